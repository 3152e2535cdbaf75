"""What the decode loop needs of a language model; `models` provides it, tests may fake it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

Params = Any
"""A pytree of arrays: the weights of a decoder."""

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""``attend(layer, q, k, v) -> out``: one layer's attention over its past and these tokens.

``q`` and ``out`` are ``[B, T, H, D]``, ``k`` and ``v`` ``[B, T, G, D]``; ``q`` and ``k`` carry
their positional encoding. The callee owns the key-value cache: it appends ``k`` and ``v`` itself.
"""


@dataclass(frozen=True)
class Geometry:
    """Shapes that attention depends on.

    Attributes:
        num_layers: decoder blocks.
        num_heads: query heads, H.
        num_kv_heads: key-value heads, G; divides H.
        head_dim: D.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head, H // G."""
        return self.num_heads // self.num_kv_heads


class Decoder(Protocol):
    """A decoder-only transformer as pure functions of its parameters; hashable, so jit-static."""

    @property
    def geometry(self) -> Geometry:
        """The shapes that attention depends on."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def max_positions(self) -> int:
        """Positions the model was trained for, after RoPE scaling."""
        ...

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of weights, activations and of the key-value cache."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """Devices over which weights and caches are sharded; None for one device."""
        ...

    def hidden(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        sequence_lengths: jax.Array,
        attend: Attend,
    ) -> jax.Array:
        """Runs every block over ``tokens``.

        Args:
            params: the weights.
            tokens: int32 ``[B, T]``.
            positions: int32 ``[B, T]``, absolute position of every token.
            sequence_lengths: int32 ``[B]``, tokens of each row's whole sequence so far, those of
                this call and (in a chunked prefill) of later chunks included; RoPE scaling of type
                ``dynamic`` depends on it.
            attend: called once per layer, in order.

        Returns:
            ``[B, T, E]``, before the final norm.
        """
        ...

    def inverse_frequencies(self, sequence_lengths: jax.Array) -> jax.Array:
        """Radians per position by which the pairs (i, i + D / 2) of a key are rotated.

        Args:
            sequence_lengths: int32 ``[B]``.

        Returns:
            float32 ``[B, D / 2]``.
        """
        ...

    @property
    def rotary_scale(self) -> float:
        """What rotated queries and keys are multiplied by: 1 but for YaRN."""
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Final norm and output head: ``[..., E]`` to float32 ``[..., V]``."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any.
            begins: the text begins a sequence: the special tokens that the model expects there
                are added.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out."""
        ...


class LanguageModel(Protocol):
    """A decoder with its weights and tokenizer."""

    @property
    def decoder(self) -> Decoder:
        """The pure functions."""
        ...

    @property
    def params(self) -> Params:
        """The weights."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the checkpoint has no tokenizer; then only token ids can be prompts."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence."""
        ...
