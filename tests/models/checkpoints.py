"""Small random checkpoints, written to disk by transformers."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LLAMA: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "head_dim"}
QWEN2["hidden_size"] = 64


def write_random(
    directory: Path, family: str = "llama", *, shard_size: str = "5GB", **options: Any
) -> transformers.PreTrainedModel:
    """Saves a model whose every weight, biases and norm scales included, is random."""
    if family == "llama":
        config = transformers.LlamaConfig(**{**LLAMA, **options})
    else:
        config = transformers.Qwen2Config(**{**QWEN2, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn(weight.shape)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * draw)
            elif name.endswith("bias"):
                weight.copy_(0.3 * draw)
            else:
                weight.copy_(draw * 1.5 / math.sqrt(weight.shape[1]))
    with contextlib.redirect_stderr(None):
        model.save_pretrained(directory, max_shard_size=shard_size)
    return model.eval()


def edit_json(path: Path, **changes: Any) -> None:
    """Changes entries of a JSON object; None removes one."""
    entries = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))
