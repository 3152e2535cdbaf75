"""Small GGUF files, written the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from gguf.quants import quantize

MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{MODULES['.'.join(module)]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """From pairs (i, i + D/2) to pairs (2i, 2i + 1), as GGUF's Llama architecture has them."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    extra_tensors: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> dict[str, np.ndarray]:
    """Writes a model; returns its tensors as quantised and under Hugging Face names.

    Args:
        path: the file.
        model: Llama or Qwen2.
        kind: type of the matrices; vectors are float32.
        extra_tensors: written as they are.
        **metadata: keys with dots written as two underscores; None leaves one out. They come on
            top of what the model's config says, ``architecture__`` stands for the architecture.
    """
    config = model.config
    architecture = config.model_type
    entries: dict[str, Any] = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if getattr(config, "head_dim", None):
        entries[f"{architecture}.attention.key_length"] = config.head_dim
    for key, value in metadata.items():
        entries[key.replace("architecture__", f"{architecture}__", 1).replace("__", ".")] = value
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        add(writer, key, value)
    written = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        stored = values
        if architecture == "llama" and ".q_proj." in name:
            stored = interleave(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            stored = interleave(values, config.num_key_value_heads)
        used = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(stored, used), raw_dtype=used)
        written[name] = gguf.quants.dequantize(quantize(values, used), used)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(key)
