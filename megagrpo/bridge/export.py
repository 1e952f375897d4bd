"""This rank's parameters -> whole Hugging Face tensors, as a stream with one tensor alive on the writer."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo.boxes import Box, extent, size
from megagrpo.bridge.merged import Merged, merged_blocks
from megagrpo.bridge.sources import INDEX, SINGLE, new_folder
from megagrpo.families.blocks import Block
from megagrpo.parallel.layout import Layout
from megagrpo.policy.hf_config import HfConfig

SIDE_FILES = (".json", ".jinja", ".txt", ".model")
Held = list[tuple[str, Tensor | Merged, list[Block]]]  # this rank's parameters with their blocks
_SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


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

    Collective: every rank of the world must exhaust the iterator. Each block is sent once, by one of the ranks that hold it.
    `dtype` None keeps the parameters' own; weights with adapters come with these added, in float32. Reads `param.data`, so an optimizer
    that gathers parameters late must have done so.
    """
    held = list(merged_blocks(chunks, hf_config, layout))
    yield from _stream(held, layout, find_sources(held, layout), dtype, writer)


def find_sources(parameters: Held, layout: Layout) -> dict[str, Source]:
    """Every tensor that the ranks' parameters make up, in layer order, each block with the lowest rank that holds it. Collective, small
    messages only."""
    held = [(b.name, b.shape, param.dtype, b.box) for _, param, found in parameters for b in found]
    sources: dict[str, Source] = {}
    for rank, of_rank in enumerate(layout.all_gather_objects(held)):
        for name, shape, dtype, box in of_rank:
            sources.setdefault(name, Source(shape, dtype, {})).senders.setdefault(box, rank)
    for name, source in sources.items():
        found, count = sum(map(size, source.senders)), math.prod(source.shape)
        assert found == count, f"{name}: the ranks hold {found} of {count} elements"
    return {name: sources[name] for name in sorted(sources, key=_natural)}


def _stream(held: Held, layout: Layout, sources: dict[str, Source], dtype: torch.dtype | None, writer: int):
    mine = {(b.name, b.box): (param, b) for _, param, found in held for b in found}
    am_writer = layout.world_rank == writer
    for name, source in sources.items():
        full = torch.empty(source.shape, dtype=dtype or source.dtype) if am_writer else None
        for box, sender in sorted(source.senders.items()):
            part = None
            if layout.world_rank == sender:
                param, block = mine[name, box]
                part = _local_part(param, block)
            if sender != writer:
                part = _pass_on(part, source, box, sender, writer, layout)
            if am_writer:
                full[tuple(map(slice, *box))].copy_(part)
        if am_writer:
            yield name, full


def _local_part(param: Tensor | Merged, block: Block) -> Tensor:
    return block.read(param.data).to("cpu").contiguous()


def _pass_on(part: Tensor | None, source: Source, box: Box, sender: int, writer: int, layout: Layout) -> Tensor | None:
    """Move one block from `sender` to `writer` over the CPU group, as bytes; the block on the writer, None elsewhere."""
    if layout.world_rank == sender:
        dist.send(part.view(torch.uint8), dst=writer, group=layout.cpu_group)
    elif layout.world_rank == writer:
        received = torch.empty(extent(box), dtype=source.dtype)
        dist.recv(received.view(torch.uint8), src=sender, group=layout.cpu_group)
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
    max_shard_bytes: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model, adapters added to its weights, as a Hugging Face folder: safetensors in `dtype` (None: the one that config.json
    names), split into files of at most `max_shard_bytes` with an index when there are several, and config and tokenizer copied from
    `source_folder`.

    Collective; rank 0 writes. The folder appears complete or not at all, also when a rank dies or the disk fills. Raises ValueError when
    `out_folder` exists and is not empty, OSError on every rank when it cannot be written.
    """
    out_folder, source_folder = Path(out_folder), Path(source_folder)
    refuse_non_empty(out_folder, layout)
    dtype = dtype or getattr(torch, hf_config.dtype)

    def write(stream: Stream, sources: dict[str, Source], unfinished: Path) -> None:
        _write_weights(stream, sources, dtype, unfinished, max_shard_bytes)
        copy_side_files(source_folder, unfinished)

    save_folder(out_folder, list(merged_blocks(chunks, hf_config, layout)), layout, dtype, write)


def save_folder(
    folder: Path, held: Held, layout: Layout, dtype: torch.dtype, write: Callable[[Stream, dict[str, Source], Path], None]
) -> None:
    """Have rank 0 `write` the stream of whole tensors into a folder that appears complete or not at all. Collective; OSError on every rank
    when it cannot be written."""
    sources = find_sources(held, layout)
    with torch.no_grad():
        stream = _stream(held, layout, sources, dtype, writer=0)
        failure = None
        try:
            if layout.world_rank == 0:
                with new_folder(folder) as unfinished:
                    write(stream, sources, unfinished)
        except OSError as e:
            failure = str(e)
        for _ in stream:  # the other ranks' part; after a failure also rank 0's, or they would wait for ever
            pass
    failure = layout.all_gather_objects(failure)[0]
    if failure:
        raise OSError(f"{folder}: {failure}")


def refuse_non_empty(folder: Path, layout: Layout) -> None:
    """ValueError on every rank when `folder` holds anything on rank 0's machine. Collective."""
    taken = layout.all_gather_objects(folder.exists() and (not folder.is_dir() or any(folder.iterdir())))[0]
    if taken:
        raise ValueError(f"{folder} exists and is not empty; name a new folder or remove it")


def _write_weights(stream: Stream, sources: dict[str, Source], dtype: torch.dtype, folder: Path, limit: int) -> None:
    """Write the stream into as few safetensors files as `limit` allows; sizes are known beforehand, so nothing is held back."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, source in sources.items():
        nbytes = _nbytes(source, dtype)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    n = len(shards)
    files = [SINGLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    for file, names in zip(files, shards, strict=True):
        write_safetensors(folder / file, names, stream, sources, dtype)
    if n > 1:
        total = sum(_nbytes(source, dtype) for source in sources.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _nbytes(source: Source, dtype: torch.dtype) -> int:
    return torch.Size(source.shape).numel() * dtype.itemsize


def write_safetensors(path: Path, names: list[str], stream: Stream, sources: dict[str, Source], dtype) -> None:
    """One file of the safetensors format with the tensors `names`, which come next in the stream, one by one: the header's length in 8
    bytes, the header in JSON, the bytes. Its own library wants all tensors of a file at once."""
    header: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + _nbytes(sources[name], dtype)
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(sources[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors that follow, so they start aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected in names:
            name, tensor = next(stream)
            assert name == expected
            file.write(tensor.view(torch.uint8).numpy().data)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy what is no weight: config, tokenizer, chat template, generation config."""
    for file in source.iterdir():
        if file.suffix in SIDE_FILES and file.name != INDEX:
            shutil.copyfile(file, target / file.name)
