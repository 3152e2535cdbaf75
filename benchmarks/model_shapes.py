"""Shapes of the models that whole decode steps are timed on; the weights are random."""

from models import ModelConfig, Rope

POSITIONS = 2**23
"""Positions of every shape; random weights were trained for none, and time does not ask."""


def _shape(
    model_type: str,
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int = 128,
    theta: float = 1e6,
) -> ModelConfig:
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-6,
        rope=Rope(
            rope_type="default",
            theta=theta,
            head_dim=dim,
            max_position_embeddings=POSITIONS,
            original_max_positions=POSITIONS,
        ),
        qkv_bias=model_type == "qwen2",
        output_bias=False,
        mlp_bias=False,
        tied=False,
        eos_token_ids=frozenset(),
    )


SHAPES = {
    "qwen2.5-7b": _shape(
        "qwen2", vocab=152064, hidden=3584, inner=18944, layers=28, heads=28, kv_heads=4
    ),
    "qwen2.5-14b": _shape(
        "qwen2", vocab=152064, hidden=5120, inner=13824, layers=48, heads=40, kv_heads=8
    ),
    "llama-3.1-8b": _shape(
        "llama", vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, theta=5e5
    ),
    "tiny": _shape(
        "qwen2", vocab=64, hidden=32, inner=48, layers=3, heads=4, kv_heads=2, dim=8, theta=1e4
    ),
}
"""By name; ``tiny`` shows that a benchmark runs."""
