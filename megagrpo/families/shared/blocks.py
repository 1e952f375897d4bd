"""Blocks: the parts of Hugging Face tensors that a Megatron parameter holds, and their place in it.

Hugging Face tensor space is the common coordinate system of loading, exporting and live weight sync. A rule turns one
local parameter into blocks without communication. A family's file assigns rules to parameters. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.boxes import Box, cut, extent
from megagrpo.families.shared.recurrence import GatedDelta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The part `box` of the Hugging Face tensor `name` with full shape `shape`.

    It is stored in a local parameter viewed as `grid`, at indices [at, at + count) of `axis`; then the dimensions are
    permuted by `order`, if given. Plain data: blocks with equal fields are equal, and they can be pickled.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    grid: tuple[int, ...]
    axis: int
    at: int
    count: int
    order: tuple[int, ...] | None = None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of this block in Hugging Face space."""
        return extent(self.box)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select this block in the whole Hugging Face tensor."""
        return tuple(map(slice, *self.box))

    def view(self, param: Tensor) -> Tensor:
        """Return a writable view of this block's elements inside `param`, in the order of the Hugging Face tensor.

        Its shape may have more dimensions than `block_shape`: compare through reshape.
        """
        view = param.view(self.grid).narrow(self.axis, self.at, self.count)
        return view if self.order is None else view.permute(self.order)

    def read(self, param: Tensor) -> Tensor:
        """Return this block as a tensor of `block_shape` in param's dtype; no copy if `param` stores this order."""
        return self.view(param).reshape(self.block_shape)


class Shaped(Protocol):
    """A parameter, or what stands for it, as a rule sees it: its shape and Megatron's attributes."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Local:
    """The inputs of a rule: one parameter of this rank."""

    param: Shaped
    tp_size: int  # size of the group that shards this parameter (experts have another group)
    tp_rank: int
    hf: HfConfig
    expert: int | None = None  # global index of the expert that it belongs to


@dataclass(frozen=True)
class BlockRule:
    """Names of the tensors that a parameter is a part of ({L} stands for the decoder block, {E} for the expert), and
    the function to its blocks. `of_tensor` returns the rule of a parameter with the rows of one of these tensors alone,
    in the same order; None if the rank has these rows in the tensor's order."""

    names: tuple[str, ...]
    blocks: Callable[[Local], list[Block]]
    of_tensor: Callable[[str], BlockRule] | None = None

    def renamed(self, name_of: Callable[[str], str]) -> BlockRule:
        """Return the rule with `name_of(name)` for the name of each tensor."""

        def blocks(local: Local) -> list[Block]:
            return [dataclasses.replace(block, name=name_of(block.name)) for block in self.blocks(local)]

        return BlockRule(tuple(map(name_of, self.names)), blocks)


def same(name: str) -> BlockRule:
    """One tensor, sharded along Megatron's partition dimension or replicated on every tensor-parallel rank."""

    def blocks(local: Local) -> list[Block]:
        p = local.param
        shape = tuple(p.shape)
        split = local.tp_size > 1 and getattr(p, "tensor_model_parallel", False)
        dim: int = attrgetter("partition_dim")(p) if split else 0
        n = shape[dim]
        full = (*shape[:dim], n * local.tp_size, *shape[dim + 1 :]) if split else shape
        start = n * local.tp_rank if split else 0
        return [Block(name, full, cut(full, dim, start, start + n), grid=shape, axis=dim, at=0, count=n)]

    return BlockRule((name,), blocks)


def scalar(name: str) -> BlockRule:
    """A tensor without dimensions, of which every rank has a parameter with one element."""
    return BlockRule((name,), lambda local: [Block(name, (), ((), ()), grid=(1,), axis=0, at=0, count=1)])


def vocab(name: str) -> BlockRule:
    """A tensor with one row per token. Megatron pads the vocabulary; padding rows belong to no block."""

    def blocks(local: Local) -> list[Block]:
        rows, width = local.param.shape
        start = rows * local.tp_rank
        stop = min(start + rows, local.hf.vocab_size)
        if stop <= start:
            return []
        full = (local.hf.vocab_size, width)
        return [Block(name, full, cut(full, 0, start, stop), grid=(rows, width), axis=0, at=0, count=stop - start)]

    return BlockRule((name,), blocks)


def qkv(pattern: str, parts: str = "qkv") -> BlockRule:
    """Queries, keys and values of attention in one Megatron parameter; without values if `parts` is "qk".

    Megatron interleaves by group, `[group][its queries, key, value][head_dim]`, and shards between groups. Hugging Face
    has three tensors, with {p} in `pattern` for q, k and v; without {p} one: queries above keys above values. With more
    tensor-parallel ranks than groups, several ranks share the rows of a group, cut without regard to heads.
    """
    names = tuple(dict.fromkeys(pattern.replace("{p}", p) for p in parts))
    fused = len(names) == 1

    def blocks(local: Local) -> list[Block]:
        hf, rest = local.hf, tuple(local.param.shape[1:])
        groups, queries = hf.num_kv_heads // local.tp_size, hf.num_heads // hf.num_kv_heads
        grid = (groups, queries + len(parts) - 1, hf.head_dim, *rest) if groups else tuple(local.param.shape)
        sizes = hf.num_heads, hf.num_kv_heads, hf.head_dim
        held = {} if groups else qkv_segments(*sizes, local.tp_size, local.tp_rank)
        found, above, row = [], 0, 0
        for p, at, count in zip(parts, (0, queries, queries + 1), (queries, 1, 1), strict=False):
            rows = count * hf.head_dim  # rows of one group
            total = ((queries + 2) * hf.head_dim if fused else rows) * hf.num_kv_heads
            name, full = pattern.replace("{p}", p), (total, *rest)
            if groups:
                start = above + rows * groups * local.tp_rank
                box = cut(full, 0, start, start + rows * groups)
                found.append(Block(name, full, box, grid, axis=1, at=at, count=count))
            elif held[p]:
                box = cut(full, 0, above + held[p].start, above + held[p].stop)
                found.append(Block(name, full, box, grid, axis=0, at=row, count=len(held[p])))
                row += len(held[p])
            above += rows * hf.num_kv_heads if fused else 0
        return found

    return BlockRule(names, blocks)


def qkv_segments(heads: int, kv_heads: int, head_dim: int, tp_size: int, tp_rank: int) -> dict[str, range]:
    """Return the rows of the whole q, k and v that a rank holds, one above the other, where `tp_size` is a multiple of
    `kv_heads`: Megatron cuts the rows of all groups evenly, so a rank has a part of one group."""
    queries = heads // kv_heads
    group = (queries + 2) * head_dim
    first = group * kv_heads * tp_rank // tp_size
    last = group * kv_heads * (tp_rank + 1) // tp_size
    index, parts = first // group, {}
    for p, at, count in zip("qkv", (0, queries, queries + 1), (queries, 1, 1), strict=True):
        rows, above = count * head_dim, group * index + at * head_dim  # of this group's p
        lo, hi = (min(max(row - above, 0), rows) for row in (first, last))
        parts[p] = range(rows * index + lo, rows * index + hi)
    return parts


Run = tuple[str, int, int, int]  # name of a tensor, its rows, first row and number of rows


def _runs(local: Local, runs: Iterable[Run]) -> list[Block]:
    """Return the blocks of a parameter whose rows are these runs of rows, one after the other."""
    grid, row, parts = tuple(local.param.shape), 0, []
    for name, total, start, count in runs:
        full = (total, *grid[1:])
        parts.append(Block(name, full, cut(full, 0, start, start + count), grid, axis=0, at=row, count=count))
        row += count
    assert row == grid[0], f"the runs have {row} rows, the parameter {grid[0]}"
    return parts


def _of_runs(names: tuple[str, ...], runs: Callable[[Local], list[Run]]) -> BlockRule:
    def of_tensor(name: str) -> BlockRule:
        return _of_runs((name,), lambda local: [run for run in runs(local) if run[0] == name])

    return BlockRule(names, lambda local: _runs(local, runs(local)), of_tensor)


def gated_qkv(pattern: str) -> BlockRule:
    """`qkv` of attention with an output gate. Megatron's group is `[its queries, its gates, key, value][head_dim]`. In
    Hugging Face's tensor of queries each head's query is above its gate. Ranks may share the rows of a group."""

    def runs_of(local: Local) -> list[Run]:
        hf, d = local.hf, local.hf.head_dim
        queries = hf.num_heads // hf.num_kv_heads
        group_rows = (2 * queries + 2) * d
        rows = group_rows * hf.num_kv_heads // local.tp_size  # of this rank
        first, runs = local.tp_rank * rows, list[Run]()
        for group in range(first // group_rows, -(-(first + rows) // group_rows)):
            heads = range(group * queries, (group + 1) * queries)
            whole = [("q", 2 * hf.num_heads, 2 * h + part) for part in range(2) for h in heads]
            whole += [(p, hf.num_kv_heads, group) for p in "kv"]
            for index, (p, total, head) in enumerate(whole):
                above = group * group_rows + index * d  # rows above, in Megatron's parameter of all ranks
                lo, hi = (min(max(row - above, 0), d) for row in (first, first + rows))
                if hi > lo:
                    runs.append((pattern.replace("{p}", p), total * d, head * d + lo, hi - lo))
        return runs

    return _of_runs(tuple(pattern.replace("{p}", p) for p in "qkv"), runs_of)


def part_rows(names: dict[str, str], by_key_head: bool = False) -> BlockRule:
    """Rows of parts of a recurrence: part -> its tensor, for the parts of `Recurrence.rows` in the parameter.

    Megatron puts one part above the other and cuts each evenly. Hugging Face's tensors with several parts have them one
    above the other too, or with `by_key_head` the rows of each key head of Gated DeltaNet together.
    """
    of_tensor = {name: [part for part in names if names[part] == name] for name in names.values()}

    def runs_of(local: Local) -> list[Run]:
        recurrence = local.hf.recurrence
        assert recurrence is not None, f"{[*of_tensor]} are of a recurrence"
        rows, heads = recurrence.rows, recurrence.key_heads if isinstance(recurrence, GatedDelta) else 1
        own = range(heads * local.tp_rank // local.tp_size, heads * (local.tp_rank + 1) // local.tp_size)
        runs: list[Run] = []
        for part, name in names.items():
            parts = of_tensor[name]
            total, above = (sum(rows[one] for one in some) for some in (parts, parts[: parts.index(part)]))
            if by_key_head:
                width = rows[part] // heads
                runs += [(name, total, (head * total + above) // heads, width) for head in own]
            else:
                held = rows[part] // local.tp_size
                runs.append((name, total, above + held * local.tp_rank, held))
        return runs

    return _of_runs(tuple(of_tensor), runs_of)


def gated(gate: str, up: str) -> BlockRule:
    """Gate and up projection in one Megatron parameter: this rank's gate rows above its up projection rows.

    With one name for both, the Hugging Face tensor likewise has all gate rows above all up rows.
    """
    names = tuple(dict.fromkeys((gate, up)))

    def blocks(local: Local) -> list[Block]:
        rows, rest = local.param.shape[0] // 2, tuple(local.param.shape[1:])
        total = rows * local.tp_size
        full = (total * 2 // len(names), *rest)
        parts = []
        for at, name in enumerate((gate, up)):
            start = rows * local.tp_rank + at * (full[0] - total)
            box = cut(full, 0, start, start + rows)
            parts.append(Block(name, full, box, grid=(2, rows, *rest), axis=0, at=at, count=1))
        return parts

    return BlockRule(names, blocks)


def interleaved(name: str) -> BlockRule:
    """Gate and up projection in one tensor with alternating rows; Megatron keeps this rank's gate rows above its up
    projection rows."""

    def blocks(local: Local) -> list[Block]:
        rows, rest = local.param.shape[0] // 2, tuple(local.param.shape[1:])
        full, start = (2 * rows * local.tp_size, *rest), 2 * rows * local.tp_rank
        box, order = cut(full, 0, start, start + 2 * rows), (1, 0, *range(2, 2 + len(rest)))
        return [Block(name, full, box, grid=(2, rows, *rest), axis=0, at=0, count=2, order=order)]

    return BlockRule((name,), blocks)


def transposed(rule: BlockRule) -> BlockRule:
    """Matrices whose rows are the columns of Megatron's parameter, else as in `rule`."""

    def turned(block: Block) -> Block:
        assert block.order is None, f"{block.name} is permuted"
        (lo, hi), dims = block.box, range(len(block.grid))
        box, order = (lo[::-1], hi[::-1]), (*dims[:-2], dims[-1], dims[-2])
        return dataclasses.replace(block, shape=block.shape[::-1], box=box, order=order)

    return BlockRule(rule.names, lambda local: [turned(block) for block in rule.blocks(local)])


def of_all_experts(block: Block, expert: int, count: int, first: bool) -> Block:
    """Return the block of one expert's tensor in the tensor of all `count` experts, its `first` or last dimension."""
    (lo, hi), dims = block.box, len(block.grid)
    if first:
        box, shape, grid = ((expert, *lo), (expert + 1, *hi)), (count, *block.shape), (1, *block.grid)
        order = None if block.order is None else (0, *(dim + 1 for dim in block.order))
        return dataclasses.replace(block, shape=shape, box=box, grid=grid, axis=block.axis + 1, order=order)
    box, shape, grid = ((*lo, expert), (*hi, expert + 1)), (*block.shape, count), (*block.grid, 1)
    order = None if block.order is None else (*block.order, dims)
    return dataclasses.replace(block, shape=shape, box=box, grid=grid, order=order)


def stacked(rule: BlockRule) -> BlockRule:
    """A tensor with all experts of a decoder block: one expert after the other, each as in `rule`."""

    def blocks(local: Local) -> list[Block]:
        assert local.expert is not None, f"{rule.names} are of experts"
        return [of_all_experts(block, local.expert, local.hf.mixture.count, True) for block in rule.blocks(local)]

    return BlockRule(rule.names, blocks)


def with_last_dim(block: Block, size: int) -> Block:
    """Return the block of a tensor and parameter that have one more dimension, held whole."""
    assert block.order is None, f"{block.name} is permuted"
    (lo, hi), grid = block.box, (*block.grid, size)
    return dataclasses.replace(block, shape=(*block.shape, size), box=((*lo, 0), (*hi, size)), grid=grid)


def in_layer(block: Block, layer: int | None, expert: int | None = None) -> Block:
    """Return the block with {L} and {E} in its name filled in."""
    return dataclasses.replace(block, name=named(block.name, layer, expert))


def named(pattern: str, layer: int | None, expert: int | None = None) -> str:
    """Return `pattern` with {L} and {E} filled in."""
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert))
