import jax
import pytest

from retopk_jax.cli_cache import enable_compilation_cache


@pytest.fixture(autouse=True)
def _restored():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_user_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("RETOPK_COMPILATION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert enable_compilation_cache() == tmp_path / "retopk-jax" / "compiled"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "retopk-jax" / "compiled")


def test_named_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("RETOPK_COMPILATION_CACHE", str(tmp_path / "here"))
    assert enable_compilation_cache() == tmp_path / "here"


def test_off():
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_jax_own_setting_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("RETOPK_COMPILATION_CACHE")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert enable_compilation_cache() == tmp_path


def test_directory_that_cannot_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RETOPK_COMPILATION_CACHE", str(tmp_path / "file" / "below"))
    assert enable_compilation_cache() is None
