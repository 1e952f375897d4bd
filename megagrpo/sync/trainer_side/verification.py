"""Verifies that every server read the written weights: completely, unchanged, and of the right version.

`verify` is for transports whose workers read memory that ranks wrote. `p2p` has its own check, `DirectUpdate.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.families.shared.boxes import Box, brackets, missing, size, whole
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import SharedBlock, TensorIndex, wrong_checksum

Reads = dict[tuple[str, int], dict[Box, int]]  # (tensor, index of its block) -> part of the block -> checksum


def verify(index: TensorIndex, written: Mapping[tuple[str, int], int], reports: Sequence[dict[str, Any]]) -> None:
    """Check that each server read all of `index` as written. Raises WeightSyncError with the rank and the tensor.

    `written` maps (tensor, index of a block of it) to the block's checksum. Per server, the slices that its workers
    read must cover every tensor. A block that was read whole must have its checksum. Where slices tile a block, their
    checksums must add up to the block's checksum. For overlapping slices that are not equal, only coverage is checked.
    """
    verify_versions(index, reports)
    for server in sorted({report["server"] for report in reports}):
        reads = _reads([report for report in reports if report["server"] == server])
        for name, tensor in index.tensors.items():
            parts = [part for number in range(len(tensor.blocks)) for part in reads.get((name, number), {})]
            if left := missing(whole(tensor.shape), parts):
                raise WeightSyncError(f"{server}: no worker read {name}{brackets(left[0])}")
            for number, block in enumerate(tensor.blocks):
                _verify_block(name, block, written[name, number], reads.get((name, number), {}))


def verify_versions(index: TensorIndex, reports: Sequence[dict[str, Any]]) -> None:
    """Check that all reports, of any transport, have the index's version. Raises WeightSyncError with the worker."""
    for report in reports:
        if report["version"] != index.version:
            who = f"{report['server']}, worker {report['worker']}"
            raise WeightSyncError(f"{who} reports weight version {report['version']}; {index.version} was sent")


def _reads(reports: Sequence[dict[str, Any]]) -> Reads:
    """Return the slices a server's workers read. Raises WeightSyncError if two reads of a slice differ in checksum."""
    reads: Reads = {}
    for report in reports:
        for name, index, part, total in report["reads"]:
            box = (tuple(part[0]), tuple(part[1]))
            if reads.setdefault((name, index), {}).setdefault(box, total) != total:
                raise WeightSyncError(
                    f"{report['server']}, worker {report['worker']}: {name}{brackets(box)} changed while it was read"
                )
    return reads


def _verify_block(name: str, block: SharedBlock, written: int, read: dict[Box, int]) -> None:
    total = read.get(block.box)
    if total is None and sum(map(size, read)) == size(block.box):
        total = sum(read.values()) % 2**64
    if total not in (None, written):
        raise WeightSyncError(wrong_checksum(block.rank, name, block.box, total, written))
