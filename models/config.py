"""What a Llama or Qwen2 model is, read from its Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import ConfigError
from .rope import Rope

MODEL_TYPES = ("llama", "qwen2")

_REQUIRED_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and options of a decoder; hashable.

    Attributes:
        model_type: one of `MODEL_TYPES`.
        vocab_size: V.
        hidden_size: E.
        intermediate_size: width of the MLP.
        num_layers: decoder blocks.
        num_heads: query heads, H.
        num_kv_heads: key-value heads, G; divides H.
        head_dim: D.
        rms_norm_eps: added to the mean square before its root.
        rope: rotary embedding.
        qkv_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has one.
        mlp_bias: whether the three MLP projections have them.
        tied: whether the output head is the embedding.
        eos_token_ids: ids that the config names as ends of a sequence.
        exact_positions: length up to which this decoder computes exactly what the checkpoint's
            own code does, or None for any; Qwen2.5-1M's ``dual_chunk_attention_config`` remaps
            positions past ``chunk_size - local_size``, which this decoder does not.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    eos_token_ids: frozenset[int]
    exact_positions: int | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_heads}; "
                f"it must be a multiple of num_key_value_heads, {self.num_kv_heads}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads the contents of a Hugging Face ``config.json``.

        Raises:
            ConfigError: a missing key, a value out of range, or a model that this decoder does not
                implement; the message names the key, the value found and what is accepted.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type is {model_type!r}; supported are {', '.join(MODEL_TYPES)}"
            )
        _refuse_unsupported(config)
        sizes = {name: _positive_integer(config, name) for name in _REQUIRED_INTEGERS}
        heads = sizes["num_attention_heads"]
        if config.get("num_key_value_heads") is None:
            kv_heads = heads
        else:
            kv_heads = _positive_integer(config, "num_key_value_heads")
        if config.get("head_dim") is not None:
            head_dim = _positive_integer(config, "head_dim")
        elif sizes["hidden_size"] % heads:
            raise ConfigError(
                f"hidden_size is {sizes['hidden_size']}; without head_dim it must be a multiple "
                f"of num_attention_heads, {heads}"
            )
        else:
            head_dim = sizes["hidden_size"] // heads
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_layers=sizes["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_number(config, "rms_norm_eps"),
            rope=Rope.from_hf(config, head_dim),
            qkv_bias=model_type == "qwen2" or attention_bias,
            output_bias=model_type == "llama" and attention_bias,
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=token_ids(config.get("eos_token_id")),
            exact_positions=_exact_positions(config),
        )

    @property
    def max_positions(self) -> int:
        """Positions the model was trained for, after RoPE scaling."""
        return self.rope.max_positions

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user of this config should know, one sentence each."""
        if self.exact_positions is None:
            return ()
        return (
            "dual_chunk_attention_config is not applied: attention is exact up to "
            f"{self.exact_positions} tokens and plain RoPE past that",
        )


def with_rope(
    config: ModelConfig,
    rope_type: str,
    factor: float,
    *,
    theta: float | None = None,
    **parameters: Any,
) -> ModelConfig:
    """The same model with another RoPE scaling, for contexts past the trained length.

    The new scaling replaces one that the config has, and starts from the unextended length.

    Args:
        config: the model.
        rope_type: ``default``, ``linear``, ``dynamic``, ``llama3`` or ``yarn``.
        factor: how far to extend the context; `ModelConfig.max_positions` becomes the unextended
            length times this.
        theta: another base; None keeps the model's.
        **parameters: further fields of `Rope`, for example ``attention_factor``.

    Raises:
        ConfigError: an unsupported type, or a parameter that is missing or out of range.
    """
    old = config.rope
    original = old.original_max_positions
    rope = Rope(
        rope_type=rope_type,
        theta=old.theta if theta is None else theta,
        head_dim=old.head_dim,
        max_position_embeddings=int(original * factor) if rope_type == "llama3" else original,
        original_max_positions=original,
        factor=factor,
        **parameters,
    )
    return replace(config, rope=rope)


def token_ids(value: Any) -> frozenset[int]:
    """The ids in an entry such as ``eos_token_id``: absent, one integer or a list of them."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"eos_token_id is {value!r}; an integer or a list of them is expected")
    return frozenset(ids)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act is {activation!r}; only 'silu' is supported")
    # transformers ignores `sliding_window` unless `use_sliding_window`, and Llama has neither.
    if config.get("use_sliding_window"):
        raise ConfigError("use_sliding_window is true; only full attention is supported")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ConfigError(
            f"layer_types contains {sorted(layer_types)}; only 'full_attention' is supported"
        )
    if config["model_type"] == "llama" and config.get("sliding_window") is not None:
        raise ConfigError(
            f"sliding_window is {config['sliding_window']}; only full attention is supported"
        )
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise ConfigError(
                f"{key} is {config[key]}; mixture-of-experts models are not supported"
            )
    if config.get("quantization_config"):
        raise ConfigError(
            "quantization_config is set; supported are float32, bfloat16 and float16 tensors, "
            "or a GGUF file"
        )


def _positive_integer(config: Mapping[str, Any], key: str) -> int:
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; a positive integer is expected")
    return value


def _positive_number(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key} is {value!r}; a positive number is expected")
    return float(value)


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"config has no key {key!r}")
    return config[key]


def _exact_positions(config: Mapping[str, Any]) -> int | None:
    dual_chunk = config.get("dual_chunk_attention_config")
    if not dual_chunk:
        return None
    try:
        return int(dual_chunk["chunk_size"]) - int(dual_chunk["local_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dual_chunk_attention_config is {dual_chunk!r}; "
            "an object with integers chunk_size and local_size is expected"
        ) from error
