"""Recurrent parts in place of attention, and the sizes that loading, `megagrpo plan` and adapters need of them. Imports
no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet (arXiv 2412.06464) in place of attention in the decoder blocks `blocks`. Each key head serves
    `value_heads` / `key_heads` neighbouring value heads."""

    key_heads: int
    value_heads: int
    key_dim: int  # width of one head's queries and keys
    value_dim: int
    kernel: int  # tokens that the convolution of queries, keys and values sees
    blocks: frozenset[int]

    name = "Gated DeltaNet"
    # Beginnings of Megatron's names
    modules = tuple(
        f"self_attention.{name}" for name in ("in_proj", "conv1d", "A_log", "dt_bias", "out_norm", "out_proj")
    )

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks that can share the heads."""
        return self.key_heads

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each part of the input projections: queries, keys, values, gates (z), betas and steps (a)."""
        keys, values = self.key_heads * self.key_dim, self.inner
        return dict(q=keys, k=keys, v=values, z=values, b=self.value_heads, a=self.value_heads)

    @property
    def inner(self) -> int:
        """Inputs of the output projection."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> dict[str, int]:
        """Rows of each part that the convolution sees."""
        return {part: self.rows[part] for part in "qkv"}

    @property
    def vectors(self) -> tuple[int, int]:
        """Parameters outside of projections: (sharded over tensor-parallel ranks, replicated on all ranks)."""
        return self.kernel * sum(self.convolved.values()) + 2 * self.value_heads, self.value_dim

    @property
    def state(self) -> int:
        """Elements of a sequence's state in one block."""
        return self.inner * self.key_dim

    @property
    def flops(self) -> int:
        """FLOPs of a token in one block, without projections: each head's state decays, answers a key, takes a
        difference, and answers a query."""
        return 7 * self.state

    def shared_parts(self, tp: int) -> str:
        """Return the parts of which each of `tp` workers of vLLM has all rows."""
        return ""

    def why_not(self, tp: int, cp: int) -> str | None:
        """Return why these numbers of ranks cannot share the heads; None if they can."""
        said = f"linear_num_key_heads={self.key_heads} is not divisible by tp x cp = {tp * cp}"
        return said if self.key_heads % (tp * cp) else None

    def sections(self, projection: str) -> dict[str, int]:
        """Return the rows of each part of an input projection, such as in_proj_qkvz; empty for others."""
        parts = projection.removeprefix("in_proj_") if projection.startswith("in_proj_") else ""
        return {part: self.rows[part] for part in parts}


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 (arXiv 2405.21060) in place of attention, or beside it, in the decoder blocks `blocks`. Each of the
    `groups` has a B and a C for `heads` / `groups` neighbouring heads."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int  # width of B and C of a group
    kernel: int  # tokens that the convolution of inputs, B and C sees
    blocks: frozenset[int]
    conv_bias: bool = True
    normed: bool = True  # the output, after its gate, is normalised
    scales: tuple[float, ...] = ()  # factors on the parts of the input projection, in the order of `rows`

    name = "Mamba-2"
    modules = ("mixer.", "norm.")

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks that can share the heads."""
        return self.heads

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each part of the input projection: gates (z), inputs (x), B, C and steps (dt)."""
        of_groups = self.groups * self.state_dim
        return dict(z=self.inner, x=self.inner, B=of_groups, C=of_groups, dt=self.heads)

    @property
    def inner(self) -> int:
        """Inputs of the output projection."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> dict[str, int]:
        """Rows of each part that the convolution sees."""
        return {part: self.rows[part] for part in "xBC"}

    @property
    def vectors(self) -> tuple[int, int]:
        """Parameters outside of projections: (sharded over tensor-parallel ranks, replicated on all ranks)."""
        return (self.kernel + self.conv_bias) * sum(
            self.convolved.values()
        ) + 3 * self.heads + self.inner * self.normed, 0

    @property
    def state(self) -> int:
        """Elements of a sequence's state in one block."""
        return self.inner * self.state_dim

    @property
    def flops(self) -> int:
        """FLOPs of a token in one block, without projections: each head's state decays, takes an input, and is read."""
        return 5 * self.state

    def kept(self, wide: float) -> float:
        """Return the elements per token and block that a forward pass keeps: the projections, three times what the
        convolution sees, the output of the recurrence, `wide` times as large as other elements, and its norm."""
        return sum(self.rows.values()) + 3 * sum(self.convolved.values()) + (1 + wide) * self.inner

    def shared_parts(self, tp: int) -> str:
        """Return the parts of which each of `tp` workers of vLLM has all rows."""
        return "BC" if self.groups % tp else ""

    def why_not(self, tp: int, cp: int) -> str | None:
        """Return why these numbers of ranks cannot share the heads and groups; None if they can."""
        ranks, groups = tp * cp, self.groups
        if self.heads % ranks:
            return f"the {self.heads} heads of Mamba-2 are not divisible by tp x cp = {ranks}"
        if groups % tp and (groups > 1 or self.state_dim % tp):
            return f"the {groups} groups of Mamba-2, of {self.state_dim} rows each, cannot be shared by tp={tp} ranks"
        if groups % ranks and ranks % groups:
            return f"tp x cp = {ranks} neither divides the {groups} groups of Mamba-2 nor is a multiple of them"
        return None

    def sections(self, projection: str) -> dict[str, int]:
        """Return the rows of each part of the input projection; empty for others."""
        return self.rows if projection == "in_proj" else {}


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2, arXiv 2511.23404) in place of attention in the decoder blocks `blocks`: each
    channel's inputs x, times B, are convolved over the past, and the result is multiplied by C."""

    width: int  # channels, which is the width of hidden states
    kernel: int  # tokens that the convolution sees
    blocks: frozenset[int]

    name = "short convolutions"
    modules = Mamba2.modules

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks that can share the channels."""
        return self.width

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each part of the input projection: B, C and x."""
        return dict.fromkeys("BCx", self.width)

    @property
    def inner(self) -> int:
        """Inputs of the output projection."""
        return self.width

    @property
    def convolved(self) -> dict[str, int]:
        """Rows of the part that the convolution sees."""
        return dict(x=self.width)

    @property
    def vectors(self) -> tuple[int, int]:
        """Parameters outside of projections: (sharded over tensor-parallel ranks, replicated on all ranks)."""
        return self.kernel * self.width, 0

    @property
    def state(self) -> int:
        """Elements of a sequence's state in one block, besides its last tokens."""
        return 0

    @property
    def flops(self) -> int:
        """FLOPs of a token in one block, without projections."""
        return 2 * (self.kernel + 1) * self.width

    def shared_parts(self, tp: int) -> str:
        """Return the parts of which each of `tp` workers of vLLM has all rows."""
        return ""

    def why_not(self, tp: int, cp: int) -> str | None:
        """Return why these numbers of ranks cannot share the channels; None if they can."""
        said = f"hidden_size={self.width}, the channels of short convolutions, is not divisible by tp x cp = {tp * cp}"
        return said if self.width % (tp * cp) else None

    def sections(self, projection: str) -> dict[str, int]:
        """Return the rows of each part of the input projection; empty for others."""
        return self.rows if projection == "in_proj" else {}


Recurrence = GatedDelta | Mamba2 | ShortConv
