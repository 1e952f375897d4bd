"""Streams whole Hugging Face tensors from the ranks' parameters; the writer holds one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import Box, extent, size, whole
from megagrpo.families.weight_sources import new_folder
from megagrpo.platform.parallel.agree import on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.weights.blocks.parameter_blocks import merged_blocks
from megagrpo.weights.bridge.hf_files import Rounded, Writer, copy_side_files, files_for
from megagrpo.weights.files.partial_files import refuse_taken

Stream = Iterator[tuple[str, Tensor]]  # (name, whole tensor)


class Readable(Protocol):
    """A parameter of this rank, or what reads like one: in fewer bits, with adapters merged, or in a file. Each access
    to `data` may compute or read it again."""

    @property
    def data(self) -> Tensor:
        """The values on this rank, in Megatron's shape."""

    @property
    def dtype(self) -> torch.dtype: ...


Parameters = Sequence[tuple[str, Readable, list[Block]]]  # (name, parameter, its blocks), for this rank


@dataclass(frozen=True)
class Source:
    """The senders of one Hugging Face tensor: `senders` maps each block's box to the rank that sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    senders: dict[Box, int]


def find_sources(parameters: Parameters, layout: Layout) -> dict[str, Source]:
    """Return all tensors in layer order; the lowest rank with a block sends it. Collective.

    Every rank receives the names of all blocks as Python objects: once in a run for the same parameters.
    """
    mine = [(b.name, b.shape, param.dtype, b.box) for _, param, blocks in parameters for b in blocks]
    sources: dict[str, Source] = {}
    for rank, of_rank in enumerate(layout.all_gather_objects(mine)):
        for name, shape, dtype, box in of_rank:
            source = sources.setdefault(name, Source(shape, dtype, {}))
            assert source.dtype == dtype, f"{name}: parts in {source.dtype} and {dtype}"
            source.senders.setdefault(box, rank)
    for name, source in sources.items():
        sent, count = sum(map(size, source.senders)), math.prod(source.shape)
        assert sent == count, f"{name}: the ranks hold {sent} of {count} elements"
    return {name: sources[name] for name in sorted(sources, key=_natural)}


@torch.no_grad()
def stream(
    parameters: Parameters, layout: Layout, sources: dict[str, Source], names: Collection[str], writer: int = 0
) -> Stream:
    """Yield (name, whole tensor) for `names`, in order, on rank `writer`'s CPU; others yield nothing. Collective.

    Every rank must exhaust the stream. When a rank cannot read a parameter, no further tensor is yielded, and at the
    end every rank raises.
    """
    mine = {(b.name, b.box): (param, b) for _, param, blocks in parameters for b in blocks}
    failure: Exception | None = None
    failed = False
    for name in names:
        source = sources[name]
        full: Tensor | None = None
        for box, sender in sorted(source.senders.items()):
            part: Tensor | None = None
            if layout.world_rank == sender and failure is None:
                try:
                    param, block = mine[name, box]
                    part = block.read(param.data).to("cpu")
                except Exception as error:  # the writer waits for this rank's parts
                    failure = error
            if sender != writer:
                part = _pass_on(part, source, box, sender, writer, layout)
            if layout.world_rank != writer:
                continue
            failed |= part is None
            if failed or part is None:
                continue
            if box == whole(source.shape):
                full = part
            else:
                full = torch.empty(source.shape, dtype=source.dtype) if full is None else full
                full[tuple(map(slice, *box))].copy_(part)
        if layout.world_rank == writer and not failed:
            assert full is not None, f"{name} has at least one block"
            yield name, full
    run_own_and_agree(layout, lambda: _raise(failure))


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _pass_on(part: Tensor | None, source: Source, box: Box, sender: int, writer: int, layout: Layout) -> Tensor | None:
    """Send a block from `sender` to `writer` over the CPU group, as bytes, after a flag that says whether it exists.

    Returns the block [extent(box)] on the writer, or None when it does not exist. Returns None on other ranks.
    """
    there = torch.tensor([part is not None])
    if layout.world_rank == sender:
        dist.send(there, dst=writer, group=layout.cpu_group)
        if part is not None:
            dist.send(part.contiguous().view(-1).view(torch.uint8), dst=writer, group=layout.cpu_group)
    elif layout.world_rank == writer:
        dist.recv(there, src=sender, group=layout.cpu_group)
        if there:
            received = torch.empty(extent(box), dtype=source.dtype)
            dist.recv(received.view(-1).view(torch.uint8), src=sender, group=layout.cpu_group)
            return received
    return None


def _natural(name: str) -> list[str | int]:
    """Sort key that orders layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def save_hf(
    chunks: list[nn.Module],
    hf_config: HfConfig,
    layout: Layout,
    out_folder: str | Path,
    source_folder: str | Path,
    *,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = SILENT,
) -> Rounded:
    """Write the model with merged adapters as a Hugging Face folder. Collective; rank 0 writes. `progress` shows the
    bytes. Returns, on rank 0, between which dtypes values have been rounded.

    Config, tokenizer and untrained tensors are copied from `source_folder`. The safetensors files have its names and,
    with `dtype` None, its dtypes. With `max_shard_bytes`, or if it has no weights, files are new and `dtype` None means
    config.json's dtype. Files hold at most `max_shard_bytes` (default 5 GiB), with an index when there are several.

    The folder appears complete or not at all, even if a rank dies or the disk fills. Raises ValueError if `out_folder`
    is not empty or a weight is NaN or infinite. Raises OSError on a failed write. Other ranks raise RankError.
    """
    out_folder, source_folder = Path(out_folder), Path(source_folder)
    refuse_non_empty(out_folder, layout)
    rounded: Rounded = set()

    def write(tensors: Stream, sources: dict[str, Source], unfinished: Path) -> None:
        files, copies, untrained = files_for(shapes(sources), source_folder, hf_config, dtype, max_shard_bytes)
        with Writer(unfinished, files, copies) as writer, progress.task(f"writing {out_folder.name}") as task:
            task.expect(sum(entry.nbytes for entry in files.entries.values()), "B")
            for name, tensor in tensors:
                task.advance(writer.write(name, tensor))
            writer.copy_untrained(untrained, source_folder, task)
        rounded.update(writer.rounded)
        copy_side_files(source_folder, unfinished, dtype)

    parameters = list(merged_blocks(chunks, hf_config, layout))
    save_folder(out_folder, parameters, layout, find_sources(parameters, layout), write)
    return rounded


def shapes(sources: dict[str, Source]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    return {name: source.shape for name, source in sources.items()}


def save_folder(
    folder: Path,
    parameters: Parameters,
    layout: Layout,
    sources: dict[str, Source],
    write: Callable[[Stream, dict[str, Source], Path], None],
) -> None:
    """Call `write` on rank 0 with the stream of whole tensors, to create `folder`. Collective.

    `sources` are those of `find_sources`. The folder appears complete or not at all. When anything fails every rank
    raises; the failing rank raises its own error.
    """
    tensors = stream(parameters, layout, sources, sources)

    def write_all() -> None:
        if layout.world_rank == 0:
            with new_folder(folder) as unfinished:
                write(tensors, sources, unfinished)

    exhaust(write_all, tensors, layout)


def exhaust(action: Callable[[], None], tensors: Stream, layout: Layout) -> None:
    """Run `action`, which consumes the stream on the writer, and then exhaust the stream on every rank. Collective.

    After a failure the rest of the stream is exhausted, or other ranks would hang. When anything fails all ranks raise.
    """
    failures = []
    for attempt in (action, lambda: sum(0 for _ in tensors)):
        try:
            attempt()
        except Exception as error:
            failures.append(error)
    run_own_and_agree(layout, lambda: _raise(failures[0] if failures else None))


def refuse_non_empty(folder: Path, layout: Layout) -> None:
    """Raises ValueError on every rank when `folder` is not empty on the machine of rank 0. Collective."""
    on_first_rank(layout, lambda: refuse_taken(folder))
