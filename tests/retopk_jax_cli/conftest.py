import pytest

from tests.retopk_jax_cli.checkpoint import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch):
    monkeypatch.setenv("RETOPK_COMPILATION_CACHE", "off")
