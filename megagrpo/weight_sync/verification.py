"""Proves that every server got the weights that were given: all of them, unchanged, of the right version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megagrpo.boxes import Box, brackets, missing, size, whole
from megagrpo.rollout.shared_weights import Manifest, WeightSyncError
from megagrpo.weight_sync.transport import Sums


def verify(manifest: Manifest, written: Sequence[Sums], reports: Sequence[dict[str, Any]]) -> None:
    """Prove that each server read all of `manifest` as it was written; WeightSyncError names the rank and the tensor otherwise.

    `written` has the checksums of each rank. Per server, the slices its workers read must cover every tensor. A slice that was written as
    such must have its checksum; where slices tile a block on both sides, their checksums must add up to the same. Overlapping slices that
    are not equal are held to coverage alone, unless one of them is the whole block.
    """
    given: dict[tuple[str, int], dict[Box, tuple[int, int]]] = {}  # part of a block -> who wrote it, its checksum
    for rank, sums in enumerate(written):
        for (name, index), parts in sums.items():
            for box, total in parts.items():
                first, other = given.setdefault((name, index), {}).setdefault(box, (rank, total))
                if other != total:
                    raise WeightSyncError(f"ranks {first} and {rank} hold copies of {name}{brackets(box)} that differ")
    for server in sorted({report["server"] for report in reports}):
        reads = _reads(manifest, [report for report in reports if report["server"] == server])
        for name, tensor in manifest.tensors.items():
            parts = [part for index in range(len(tensor.blocks)) for part in reads.get((name, index), {})]
            if left := missing(whole(tensor.shape), parts):
                raise WeightSyncError(f"{server}: nobody read {name}{brackets(left[0])}")
            for index, block in enumerate(tensor.blocks):
                _verify_block(name, block.box, given.get((name, index), {}), reads.get((name, index), {}))


def _reads(manifest: Manifest, reports: Sequence[dict[str, Any]]) -> Sums:
    """What the workers of one server read."""
    reads: Sums = {}
    for report in reports:
        who = f"{report['server']}, worker {report['worker']}"
        if report["version"] != manifest.version:
            raise WeightSyncError(f"{who} reports weight version {report['version']}; {manifest.version} was sent")
        for name, index, part, total in report["reads"]:
            box = (tuple(part[0]), tuple(part[1]))
            if reads.setdefault((name, index), {}).setdefault(box, total) != total:
                raise WeightSyncError(f"{who}: {name}{brackets(box)} changed while it was read")
    return reads


def _verify_block(name: str, block: Box, given: dict[Box, tuple[int, int]], read: dict[Box, int]) -> None:
    compared = [(box, *given[box], total) for box, total in read.items() if box in given]
    if not compared and all(sum(map(size, parts)) == size(block) for parts in (given, read)):
        ranks, totals = zip(*given.values(), strict=True)
        compared = [(block, ranks[0], sum(totals) % 2**64, sum(read.values()) % 2**64)]
    for box, rank, written, total in compared:
        if written != total:
            raise WeightSyncError(f"rank {rank}, {name}{brackets(box)}: checksum {total:016x} was read; {written:016x} was written")
