"""Full attention by cuDNN. It spreads a key that is not finite, so it is not tried unless named."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import platform


def full_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
) -> jax.Array:
    """See `pallas_kernels.full_attention.full_attention`."""
    if platform() != "gpu" or keys.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError("cuDNN attends in bfloat16 and float16, on a GPU")
    out = jax.nn.dot_product_attention(
        q[:, None],
        jnp.swapaxes(keys, 1, 2),
        jnp.swapaxes(values, 1, 2),
        query_seq_lengths=jnp.ones_like(lengths),
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, 0]
