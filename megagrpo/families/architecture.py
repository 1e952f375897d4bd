"""What a model's `config.json` says, in the words this project uses. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in the decoder blocks `blocks` a router sends each token through `per_token` of `count` MLPs."""

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalized: bool  # whether the weights of a token's experts are scaled to add up to 1
    blocks: frozenset[int]


@dataclass(frozen=True)
class HfConfig:
    """The architecture of a decoder. `raw` is config.json as read; the rest is what building and converting need."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the MLP in blocks without experts
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_type: str
    max_positions: int
    dtype: str  # of the weights on disk: "bfloat16", "float16" or "float32"
    raw: dict[str, Any] = field(repr=False, compare=False)
    partial_rotary_factor: float = 1.0  # share of each head's dimensions, the first ones, that positions turn
    rotary_interleaved: bool = False  # positions turn neighbouring dimensions against each other, not the two halves
    qkv_bias: bool = False
    qk_norm: bool = False  # each head's queries and keys are normalised before they are rotated
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()  # of each block: the tokens that one sees, itself included, or None for all; () when all do

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def padded_vocab(self, tp_size: int) -> int:
        """V: the vocabulary rounded up to a multiple of the tensor-parallel size. Rows from `vocab_size` on belong to no token."""
        return -(-self.vocab_size // tp_size) * tp_size

    def has_experts(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a mixture of experts in place of an MLP."""
        return self.experts is not None and block in self.experts.blocks
