"""What a model's `config.json` says, in the words this project uses. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in the decoder blocks `blocks` a router sends each token through `per_token` of `count` MLPs.

    The router's scores are the softmax of its logits or, with `sigmoid`, that of each by itself. With a `bias` each expert's own is
    added to its score when experts are chosen, and for that alone. With `groups` the experts stand in so many groups of neighbours, and a
    token's are in those `groups_per_token` whose best score, or with a bias the sum of their two best, is highest.
    """

    count: int
    per_token: int
    intermediate_size: int  # of one expert
    normalized: bool  # whether the weights of a token's experts are scaled to add up to 1
    blocks: frozenset[int]
    scale: float = 1.0  # what these weights are multiplied by
    sigmoid: bool = False
    bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0  # width of an MLP beside the experts that every token goes through
    clamp: float | None = None  # an expert computes (up + 1) gate sigmoid(1.702 gate), both clamped to this; None: silu(gate) up


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads come from one narrow vector per token.

    The first `nope_dim` elements of a head's queries and keys are not rotated; the other `rope_dim` are, and these keys are the same in all
    heads. Values have `value_dim` elements.
    """

    query_rank: int | None  # of the vector that queries come from; None: from the hidden states
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class HfConfig:
    """The architecture of a decoder. `raw` is config.json as read; the rest is what building and converting need."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
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
    linear_bias: bool = False  # of every other linear of a block, experts and routers included
    sinks: bool = False  # each head has a learned logit that takes a share of the attention and gives nothing
    qk_norm: bool = False  # each head's queries and keys are normalised before they are rotated
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()  # of each block: the tokens that one sees, itself included, or None for all; () when all do
    mla: Mla | None = None
    local_rope_theta: float | None = None  # in blocks with a window, where they turn by angles of their own, never scaled
    softmax_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    score_cap: float | None = None  # scores x of attention become cap tanh(x / cap)
    logit_cap: float | None = None  # as do the logits of the LM head
    activation: str = "silu"  # of the gate: "silu", or "gelu" in its tanh approximation
    embedding_scale: float = 1.0
    post_norms: bool = False  # what attention and MLP give is normalised as well
    centred_norms: bool = False  # weights of norms are kept as their distance from 1

    @property
    def value_dim(self) -> int:
        """Elements of each head's values."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that positions turn."""
        return self.mla.rope_dim if self.mla else int(self.head_dim * self.partial_rotary_factor)

    def padded_vocab(self, tp_size: int) -> int:
        """V: the vocabulary rounded up to a multiple of the tensor-parallel size. Rows from `vocab_size` on belong to no token."""
        return -(-self.vocab_size // tp_size) * tp_size

    def window(self, block: int) -> int | None:
        """How many tokens one sees in decoder block `block`, counted from 0; None for all."""
        return self.windows[block] if self.windows else None

    def has_experts(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a mixture of experts in place of an MLP."""
        return self.experts is not None and block in self.experts.blocks
