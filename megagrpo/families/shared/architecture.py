"""The architecture that a model's `config.json` describes, in this project's vocabulary. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megagrpo.families.shared.recurrence import GatedDelta, Mamba2, Recurrence
from megagrpo.families.shared.vision import Vision
from megagrpo.families.shared.wrapper import Naming, Wrapper

# Beginnings of Megatron's names in blocks with experts
_OF_EXPERTS = ("mlp.router.", "mlp.experts.", "mlp.shared_experts.", "mlp.norms.")
_QUERY_LINEARS = ("linear_qkv", "linear_qk", "linear_q")  # of queries, keys and values; a block has one of them
_OF_RECURRENCE = (*GatedDelta.modules, *Mamba2.modules)
_OF_MIXING = ("self_attention.", *Mamba2.modules)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: in the decoder blocks `blocks` a router sends a token through `per_token` of `count` MLPs.

    The router's scores are the softmax of its logits or, with `sigmoid`, the sigmoid of each logit. With a `bias` each
    expert's own bias is added to its score, only for the choice of experts. With `groups` the experts form that many
    groups of neighbours. A token's experts come from the `groups_per_token` groups whose best score, or with a bias the
    sum of the two best, is highest.
    """

    count: int
    per_token: int
    intermediate_size: int  # width of one expert
    normalized: bool  # whether the weights of a token's experts are normalised to sum to 1
    blocks: frozenset[int]
    scale: float = 1.0  # factor on these weights
    sigmoid: bool = False
    bias: bool = False
    shared_gate: bool = False  # the output of the shared experts is multiplied by sigmoid(x w), one number per token
    groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0  # width of the shared experts, an MLP for every token; 0: none
    interleaved: bool = False  # in files rows of gate and up projection alternate
    input_weights: bool = False  # a token's weight multiplies the input of its expert, not the output
    beside_mlp: bool = False  # shared experts have norms of their own, and the router a norm and factors (Gemma 4)
    clamp: float | None = None  # expert: (up + 1) gate sigmoid(1.702 gate), both clamped to this; None: silu(gate) up

    @property
    def softmax_bias(self) -> bool:
        """Whether a bias is added to softmax scores, which Megatron's router cannot."""
        return self.bias and not self.sigmoid


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): a low-rank latent per token yields keys and values.

    The first `nope_dim` elements of a head's queries and keys are not rotated. The other `rope_dim` are, and all heads
    share these keys. Values have `value_dim` elements.
    """

    query_rank: int | None  # width of the queries' latent; None: queries come from the hidden states
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Indexer:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): a token sees the `keys` tokens before it, itself
    included, with the highest scores. A score is the sum of relu(q k) over the indexer's heads, with a weight each."""

    heads: int
    head_dim: int  # width of a head's queries and of the keys, which all heads share; the first `rope_dim` are rotated
    keys: int
    interleaved: bool  # rotation pairs neighbouring dimensions, not the two halves


@dataclass(frozen=True)
class GlobalHeads:
    """Heads of the blocks without a window, where they differ from those of blocks with one (Gemma 4)."""

    head_dim: int
    num_kv_heads: int
    keys_as_values: bool  # values are the keys before norm and rotation, without a projection of their own


@dataclass(frozen=True)
class QueryScale:
    """A factor on the queries of the decoder blocks `blocks` that grows with the position p of a token:
    1 + strength log(1 + floor((p + offset) / length)) (scalable softmax, arXiv 2501.19399)."""

    strength: float
    length: int  # tokens
    blocks: frozenset[int]
    offset: int = 0


@dataclass(frozen=True)
class BesideAttention:
    """Factors on the inputs and outputs of attention and of the recurrent part beside it, not in its place
    (Falcon-H1)."""

    attention_in: float
    attention_out: float
    mixer_in: float
    mixer_out: float


@dataclass(frozen=True)
class HfConfig:
    """The architecture of a decoder: the fields that building and converting need. `raw` is config.json as read."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # width of one head's queries and keys
    intermediate_size: int  # width of the MLP in blocks without experts
    vocab_size: int
    tied_embeddings: bool
    norm_eps: float
    rope_theta: float
    rope_type: str
    max_positions: int
    dtype: str  # dtype of the weights on disk: "bfloat16", "float16" or "float32"
    raw: dict[str, Any] = field(repr=False, compare=False)
    # Megatron's linears outside of experts -> their Hugging Face modules, for example model.layers.{L}.mlp.down_proj
    linears: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    wrapper: Wrapper | None = field(default=None, repr=False, compare=False)  # the multimodal model around this one
    file_names: Naming = field(default=Naming(), repr=False, compare=False)  # of tensors in the model's files
    module_names: Naming = field(default=Naming(), repr=False, compare=False)  # of transformers' modules, for adapters
    vision: Vision | None = field(default=None, repr=False)  # the tower for images of `wrapper`
    partial_rotary_factor: float = 1.0  # share of each head's dimensions, the first ones, that are rotated
    rotary_interleaved: bool = False  # rotation pairs neighbouring dimensions, not the two halves of a head
    qkv_bias: bool = False
    linear_bias: bool = False  # biases on all other linears of a block, experts and routers included
    sinks: bool = False  # each head has a learned logit that takes a share of the attention and contributes 0
    qk_norm: bool = False  # each head's queries and keys are normalised before the rotation
    wide_qk_norm: bool = False  # with `qk_norm`: over the elements of all heads together
    late_qk_norm: bool = False  # with `qk_norm`: after the rotation
    unit_value_norm: bool = False  # each head's values are divided by their root mean square
    unit_qk_norm: bool = False  # blocks that rotate divide each head's queries and keys by their root mean square
    experts: Experts | None = None
    mixture_module: str = "mlp."  # of a decoder block in transformers, whose parameters adapters of experts name
    # per block: tokens that a token sees, itself included, or None for all; (): all blocks see all
    windows: tuple[int | None, ...] = ()
    global_heads: GlobalHeads | None = None
    keys_as_values: bool = False  # of one block (`in_block`): `GlobalHeads.keys_as_values`
    borrowers: int = 0  # number of last blocks that take keys and values of a block before (`lender`)
    wide_borrowers: bool = False  # MLPs of the borrowers are twice as wide
    borrows: bool = False  # of one block (`in_block`)
    layer_inputs: int = 0  # width of the vector that each token has for each block; 0: none
    chunked: bool = False  # a window starts at a multiple of its size: a token sees its own chunk up to itself
    mla: Mla | None = None
    indexer: Indexer | None = None  # with `mla`
    recurrence: Recurrence | None = None  # in place of attention in some blocks, or beside it
    beside_attention: BesideAttention | None = None  # None: `recurrence` is in place of attention
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # factors on the gate projection and the output of an MLP
    # blocks with an MLP or experts alone, if no other block has one; None: every block has both parts
    mlp_blocks: frozenset[int] | None = None
    attention_gate: bool = False  # each head's attention is multiplied by the sigmoid of its own gate
    local_rope_theta: float | None = None  # separate rope base of blocks with a window, never scaled
    unrotated: frozenset[int] = frozenset()  # decoder blocks that do not rotate queries and keys
    query_scale: QueryScale | None = None
    softmax_scale: float | None = None  # scale of attention scores; None: 1 / sqrt(head_dim)
    score_cap: float | None = None  # attention scores x become cap tanh(x / cap)
    logit_cap: float | None = None  # logits x of the LM head become cap tanh(x / cap)
    # of the gate: "silu", or "gelu" in its tanh approximation; of an MLP without gates: "relu2", "xielu"
    activation: str = "silu"
    embedding_scale: float = 1.0
    block_scales: bool = False  # a number per block, which is not trained, multiplies its output
    residual_scale: float = 1.0  # factor on the outputs of attention and MLP before the residual sum
    logit_scale: float = 1.0  # factor on the logits
    pre_norms: bool = True  # inputs of attention and MLP are normalised
    # attention and MLP of a block read the output of one norm; all norms are LayerNorm without bias
    parallel_blocks: bool = False
    post_norms: bool = False  # outputs of attention and MLP are normalised too
    centred_norms: bool = False  # norm weights are stored as their distance from 1

    @property
    def mixture(self) -> Experts:
        """The experts of a model that has some."""
        assert self.experts is not None, f"{self.family} has no experts here"
        return self.experts

    @property
    def layers_per_block(self) -> int:
        """Number of hybrid layers in one decoder block: attention or a recurrent part, and an MLP or experts."""
        return 2 if self.mlp_blocks is None else 1

    @property
    def gated_mlp(self) -> bool:
        """Whether MLPs and experts have a gate projection."""
        return self.activation not in ("relu2", "xielu")

    @property
    def mlp_matrices(self) -> int:
        """Number of projections of an MLP or expert."""
        return 3 if self.gated_mlp else 2

    @property
    def value_dim(self) -> int:
        """Width of each head's values."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of each head's dimensions that are rotated."""
        return self.mla.rope_dim if self.mla else int(self.head_dim * self.partial_rotary_factor)

    @property
    def rotates_alike(self) -> bool:
        """Whether every block rotates queries and keys by the same angles, and nothing comes between rotation and
        scores."""
        between = self.late_qk_norm or self.unit_qk_norm or self.query_scale is not None
        return self.local_rope_theta is None and not (self.unrotated or between or (self.vision and self.vision.axes))

    def kv_heads_of_rank(self, tp_size: int) -> int:
        """Return the number of KV heads that the queries of a rank attend to. With more ranks than KV heads it is 1."""
        return max(1, self.num_kv_heads // tp_size)

    def padded_vocab(self, tp_size: int) -> int:
        """Return V: the vocabulary rounded up to a multiple of `tp_size`. Rows from `vocab_size` on are unused."""
        return -(-self.vocab_size // tp_size) * tp_size

    def window(self, block: int) -> int | None:
        """Return the number of tokens that a token sees in decoder block `block`, counted from 0; None for all."""
        return self.windows[block] if self.windows else None

    def in_block(self, block: int) -> HfConfig:
        """Return the architecture with the heads of decoder block `block`, counted from 0, in place of the usual
        ones."""
        changes: dict[str, Any] = {}
        if (own := self.global_heads) is not None and self.window(block) is None:
            heads = dict(head_dim=own.head_dim, num_kv_heads=own.num_kv_heads, keys_as_values=own.keys_as_values)
            changes |= dict(global_heads=None) | heads
        if self.lender(block) is not None:
            width = self.intermediate_size * (1 + self.wide_borrowers)
            changes |= dict(borrowers=0, borrows=True, intermediate_size=width)
        return replace(self, **changes) if changes else self

    def lender(self, block: int) -> int | None:
        """Return the block whose keys and values decoder block `block`, counted from 0, borrows; None if it has its
        own."""
        first, windowed = self.num_layers - self.borrowers, self.window(block) is not None
        if block < first:
            return None
        return max(other for other in range(first) if (self.window(other) is not None) == windowed)

    @property
    def mean_mlp_width(self) -> float:
        """Width of the MLP, averaged over the blocks as if none had experts."""
        return self.intermediate_size * (1 + self.wide_borrowers * self.borrowers / self.num_layers)

    @property
    def query_linear(self) -> str:
        """Megatron's name of the linear of queries, in the architecture of one block (`in_block`)."""
        return "linear_q" if self.borrows else "linear_qk" if self.keys_as_values else "linear_qkv"

    def beyond_fused_attention(self, longest: int | None) -> bool:
        """Whether Transformer Engine's attention cannot compute the model for sequences of up to `longest` tokens, None
        for any: capped scores, chosen keys, heads wider than 256, chunks shorter than a sequence."""
        in_chunks = self.chunked and any(size and (longest is None or longest > size) for size in self.windows)
        wide = self.global_heads is not None and self.global_heads.head_dim > 256
        return self.score_cap is not None or self.indexer is not None or wide or in_chunks

    def has_experts(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a mixture of experts in place of an MLP."""
        return self.experts is not None and block in self.experts.blocks

    @property
    def has_dense_mlps(self) -> bool:
        """Whether some decoder block has an MLP without experts."""
        return any(self.has_mlp(block) and not self.has_experts(block) for block in range(self.num_layers))

    def has_mlp(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has an MLP or experts."""
        return self.mlp_blocks is None or block in self.mlp_blocks

    def has_attention(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has attention."""
        return not self.is_recurrent(block) and (self.mlp_blocks is None or block not in self.mlp_blocks)

    def is_recurrent(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a recurrent part in place of attention."""
        return self.mixes(block) and self.beside_attention is None

    def mixes(self, block: int) -> bool:
        """Whether decoder block `block`, counted from 0, has a recurrent part, in place of attention or beside it."""
        return self.recurrence is not None and block in self.recurrence.blocks

    def has(self, block: int, name: str) -> bool:
        """Whether decoder block `block`, counted from 0, has Megatron's module or parameter `name` of the family."""
        part = name.partition(".")[2].partition(".")[0]
        if part in _QUERY_LINEARS and part != self.in_block(block).query_linear:
            return False
        if part == "k_layernorm" and self.lender(block) is not None:
            return False
        if name.startswith(_OF_MIXING):
            return self.is_recurrent(block) if name.startswith(_OF_RECURRENCE) else self.has_attention(block)
        if name.startswith("mlp."):
            return self.has_mlp(block) and self.has_experts(block) == name.startswith(_OF_EXPERTS)
        return True

    def modules(self, block: int) -> dict[str, tuple[str, ...]]:
        """Return `linears` of decoder block `block`, counted from 0: only those that it has, with its number."""
        return {
            linear: tuple(name.replace("{L}", str(block)) for name in names)
            for linear, names in self.linears.items()
            if self.has(block, linear)
        }

    def experts_module(self, block: int) -> str:
        """Return transformers' module of the experts in decoder block `block`, counted from 0."""
        return self.module_names.of(f"model.layers.{block}.{self.mixture_module}experts")

    def expert_parameters(self, block: int) -> dict[str, str]:
        """Return Megatron's linears of an expert in decoder block `block` -> the parameter of all its experts in
        transformers; empty for a block without experts."""
        experts, first = self.experts_module(block), "gate_up_proj" if self.gated_mlp else "up_proj"
        names = {"linear_fc1": f"{experts}.{first}", "linear_fc2": f"{experts}.down_proj"}
        return names if self.has_experts(block) else {}
