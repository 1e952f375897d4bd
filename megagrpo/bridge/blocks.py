"""Blocks: which part of which Hugging Face tensor lives where in a Megatron parameter.

Hugging Face tensor space is the common coordinate system of loading, exporting and live weight sync. A rule turns one local
parameter into blocks without communication; `families.py` says which rule belongs to which parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megagrpo.policy.hf_config import HfConfig


@dataclass(frozen=True)
class Block:
    """Rows (or columns, if `dim` is 1) [start, stop) of the Hugging Face tensor `name` with full shape `shape`.

    They lie in a local parameter seen as `grid`, at places [at, at + count) of `axis`. Plain data: two blocks are equal when
    they say the same, and they travel by pickle.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    grid: tuple[int, ...]
    axis: int
    at: int
    count: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of this block in Hugging Face space."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def view(self, param: Tensor) -> Tensor:
        """The elements of this block inside `param`, writable, in the order of the Hugging Face tensor; their shape may be finer
        than `block_shape`: compare through reshape."""
        return param.view(self.grid).narrow(self.axis, self.at, self.count)

    def read(self, param: Tensor) -> Tensor:
        """This block as a contiguous tensor of `block_shape`; a copy unless it already lies that way in `param`."""
        return self.view(param).reshape(self.block_shape)


@dataclass(frozen=True)
class Local:
    """What a rule may know about one parameter of this rank."""

    param: Tensor
    tp_size: int  # of the group that cuts this parameter: another one for experts
    tp_rank: int
    hf: HfConfig


Rule = Callable[[Local], list[Block]]


def same(name: str) -> Rule:
    """One tensor, cut along Megatron's partition dimension or held whole by every tensor-parallel rank."""

    def rule(local: Local) -> list[Block]:
        p = local.param
        shape = tuple(p.shape)
        cut = local.tp_size > 1 and getattr(p, "tensor_model_parallel", False)
        dim = p.partition_dim if cut else 0
        n = shape[dim]
        full = (*shape[:dim], n * local.tp_size, *shape[dim + 1 :]) if cut else shape
        start = n * local.tp_rank if cut else 0
        return [Block(name, full, dim, start, start + n, grid=shape, axis=dim, at=0, count=n)]

    return rule


def vocab(name: str) -> Rule:
    """A tensor with one row per token. Megatron pads the vocabulary; rows past the real one belong to no block."""

    def rule(local: Local) -> list[Block]:
        rows, width = local.param.shape
        start = rows * local.tp_rank
        stop = min(start + rows, local.hf.vocab_size)
        if stop <= start:
            return []
        return [Block(name, (local.hf.vocab_size, width), 0, start, stop, grid=(rows, width), axis=0, at=0, count=stop - start)]

    return rule


def qkv(pattern: str) -> Rule:
    """Megatron interleaves by group, [group][its queries, key, value][head_dim], and cuts between groups; Hugging Face keeps three
    tensors. `pattern` holds {p} for q, k and v."""

    def rule(local: Local) -> list[Block]:
        hf, rest = local.hf, tuple(local.param.shape[1:])
        groups, queries = hf.num_kv_heads // local.tp_size, hf.num_heads // hf.num_kv_heads
        grid = (groups, queries + 2, hf.head_dim, *rest)
        blocks = []
        for p, at, count in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
            rows = count * hf.head_dim  # of one group
            start = rows * groups * local.tp_rank
            full = (rows * hf.num_kv_heads, *rest)
            blocks.append(Block(pattern.replace("{p}", p), full, 0, start, start + rows * groups, grid, axis=1, at=at, count=count))
        return blocks

    return rule


def gated(gate: str, up: str) -> Rule:
    """Megatron stacks this rank's rows of the gate above its rows of the up projection."""

    def rule(local: Local) -> list[Block]:
        rows, rest = local.param.shape[0] // 2, tuple(local.param.shape[1:])
        full, start = (rows * local.tp_size, *rest), rows * local.tp_rank
        return [
            Block(name, full, 0, start, start + rows, grid=(2, rows, *rest), axis=0, at=at, count=1) for at, name in enumerate((gate, up))
        ]

    return rule


def in_layer(block: Block, layer: int | None, expert: int | None = None) -> Block:
    """The block with {L} and {E} in its name filled in."""
    name = block.name.replace("{L}", str(layer)).replace("{E}", str(expert))
    return dataclasses.replace(block, name=name)
