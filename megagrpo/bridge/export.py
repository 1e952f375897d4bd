"""This rank's parameters -> whole Hugging Face tensors, as a stream with one tensor alive on the writer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.bridge.hf_files import SHARD_BYTES, Writer, copy_side_files, files_for, new_files
from megagrpo.bridge.merged import Merged, merged_blocks
from megagrpo.bridge.unfinished import refuse_taken
from megagrpo.families.blocks import Block
from megagrpo.families.boxes import Box, extent, size, whole
from megagrpo.families.config import HfConfig
from megagrpo.families.sources import new_folder
from megagrpo.parallel.agree import together
from megagrpo.parallel.layout import Layout

Held = list[tuple[str, Tensor | Merged, list[Block]]]  # this rank's parameters with their blocks
Stream = Iterator[tuple[str, Tensor]]  # (name, whole tensor)


@dataclass(frozen=True)
class Source:
    """Where one Hugging Face tensor comes from: `senders` maps each block's box to the rank that sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    senders: dict[Box, int]


@torch.no_grad()
def iter_full(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout, *, dtype: torch.dtype | None = None, writer: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) for every tensor of the model on rank `writer`, on the CPU, layer by layer; nothing on the others.

    Collective: every rank of the world must exhaust the iterator. Each block is sent once, by one of the ranks that hold it. A tensor may
    be the parameter's own memory.
    `dtype` None keeps the parameters' own; weights with adapters come with these added, in float32. Reads `param.data`, so an optimizer
    that gathers parameters late must have done so.
    """
    held = list(merged_blocks(chunks, hf_config, layout))
    sources = find_sources(held, layout)
    yield from stream(held, layout, sources, sources, dtype, writer)


def find_sources(parameters: Held, layout: Layout) -> dict[str, Source]:
    """Every tensor that the ranks' parameters make up, in layer order, each block with the lowest rank that holds it. Collective, small
    messages only."""
    held = [(b.name, b.shape, param.dtype, b.box) for _, param, found in parameters for b in found]
    sources: dict[str, Source] = {}
    for rank, of_rank in enumerate(layout.all_gather_objects(held)):
        for name, shape, dtype, box in of_rank:
            source = sources.setdefault(name, Source(shape, dtype, {}))
            assert source.dtype == dtype, f"{name}: parts in {source.dtype} and {dtype}"
            source.senders.setdefault(box, rank)
    for name, source in sources.items():
        found, count = sum(map(size, source.senders)), math.prod(source.shape)
        assert found == count, f"{name}: the ranks hold {found} of {count} elements"
    return {name: sources[name] for name in sorted(sources, key=_natural)}


@torch.no_grad()
def stream(
    held: Held, layout: Layout, sources: dict[str, Source], names: Collection[str], dtype: torch.dtype | None = None, writer: int = 0
) -> Stream:
    """The tensors `names` of `sources`, in their order, on rank `writer`; nothing on the others. Collective: every rank must exhaust it.

    When reading a parameter fails on any rank, nothing comes after it, and at the end every rank raises.
    """
    mine = {(b.name, b.box): (param, b) for _, param, found in held for b in found}
    failure: Exception | None = None
    failed = False
    for name in names:
        source, full = sources[name], None
        for box, sender in sorted(source.senders.items()):
            part = None
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
            if failed:
                continue
            if box == whole(source.shape) and dtype in (None, part.dtype):
                full = part
            else:
                full = torch.empty(source.shape, dtype=dtype or source.dtype) if full is None else full
                full[tuple(map(slice, *box))].copy_(part)
        if layout.world_rank == writer and not failed:
            yield name, full
    together(layout, lambda: _raise(failure))


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _pass_on(part: Tensor | None, source: Source, box: Box, sender: int, writer: int, layout: Layout) -> Tensor | None:
    """Move one block from `sender` to `writer` over the CPU group, as bytes, after a word whether there is one; the block on the writer,
    None elsewhere."""
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
    """Sort key under which layer 2 comes before layer 10."""
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
) -> None:
    """Write the model, adapters added to its weights, as a Hugging Face folder: config and tokenizer copied from `source_folder`, and
    safetensors in the same files and dtypes as there.

    With `max_shard_bytes` or `dtype`, or when that folder does not say, the tensors are in `dtype` (None: the one that config.json names),
    in files of at most `max_shard_bytes` (5 GiB), with an index when there are several.

    Collective; rank 0 writes. The folder appears complete or not at all, also when a rank dies or the disk fills. Raises ValueError when
    `out_folder` exists and is not empty, or a weight is NaN or infinite, OSError when it cannot be written; on other ranks RankError.
    """
    out_folder, source_folder = Path(out_folder), Path(source_folder)
    refuse_non_empty(out_folder, layout)

    def write(tensors: Stream, sources: dict[str, Source], unfinished: Path) -> None:
        if dtype is None and max_shard_bytes is None:
            files, copies = files_for(shapes(sources), source_folder, hf_config)
        else:
            in_dtype = dtype or getattr(torch, hf_config.dtype)
            files, copies = new_files({n: (in_dtype, source.shape) for n, source in sources.items()}, max_shard_bytes or SHARD_BYTES), {}
        with Writer(unfinished, files, copies) as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
        copy_side_files(source_folder, unfinished)

    save_folder(out_folder, list(merged_blocks(chunks, hf_config, layout)), layout, write)


def shapes(sources: dict[str, Source]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor."""
    return {name: source.shape for name, source in sources.items()}


def save_folder(
    folder: Path,
    held: Held,
    layout: Layout,
    write: Callable[[Stream, dict[str, Source], Path], None],
    dtype: torch.dtype | None = None,
) -> None:
    """Have rank 0 `write` the stream of whole tensors, cast to `dtype` if it is given, into a folder that appears complete or not at all.
    Collective; when anything fails every rank raises, the failing one its own error."""
    sources = find_sources(held, layout)
    tensors = stream(held, layout, sources, sources, dtype)

    def write_all() -> None:
        if layout.world_rank == 0:
            with new_folder(folder) as unfinished:
                write(tensors, sources, unfinished)

    exhaust(write_all, tensors, layout)


def exhaust(action: Callable[[], None], tensors: Stream, layout: Layout) -> None:
    """Run `action`, which takes from the stream on the rank that gets it; then the other ranks' part of it, and after a failure what is
    left, or they would wait for ever. Collective; when anything fails every rank raises."""
    failures = []
    for attempt in (action, lambda: sum(0 for _ in tensors)):
        try:
            attempt()
        except Exception as error:
            failures.append(error)
    together(layout, lambda: _raise(failures[0] if failures else None))


def refuse_non_empty(folder: Path, layout: Layout) -> None:
    """ValueError on every rank when `folder` holds anything on rank 0's machine. Collective."""
    together(layout, lambda: refuse_taken(folder), here=layout.world_rank == 0)
