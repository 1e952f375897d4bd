"""Proves that every server read what was written: all of it, unchanged, of the right version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megagrpo.families.boxes import Box, brackets, missing, size, whole
from megagrpo.transfer.manifest import Manifest, SharedBlock, WeightSyncError, wrong_checksum

Reads = dict[tuple[str, int], dict[Box, int]]  # (tensor, index of a block of it) -> checksum of each part of that block


def verify(manifest: Manifest, written: Mapping[tuple[str, int], int], reports: Sequence[dict[str, Any]]) -> None:
    """Prove that each server read all of `manifest` as it was written; WeightSyncError names the rank and the tensor otherwise.

    `written` has the checksum of each block: (tensor, index of a block of it) -> checksum. Per server, the slices its workers read must
    cover every tensor. A block that was read whole must have its checksum; where slices tile it, their checksums must add up to it.
    Overlapping slices that are not equal are held to coverage alone.
    """
    verify_versions(manifest, reports)
    for server in sorted({report["server"] for report in reports}):
        reads = _reads([report for report in reports if report["server"] == server])
        for name, tensor in manifest.tensors.items():
            parts = [part for index in range(len(tensor.blocks)) for part in reads.get((name, index), {})]
            if left := missing(whole(tensor.shape), parts):
                raise WeightSyncError(f"{server}: nobody read {name}{brackets(left[0])}")
            for index, block in enumerate(tensor.blocks):
                _verify_block(name, block, written[name, index], reads.get((name, index), {}))


def verify_versions(manifest: Manifest, reports: Sequence[dict[str, Any]]) -> None:
    """WeightSyncError names a worker whose report is about another version."""
    for report in reports:
        if report["version"] != manifest.version:
            who = f"{report['server']}, worker {report['worker']}"
            raise WeightSyncError(f"{who} reports weight version {report['version']}; {manifest.version} was sent")


def _reads(reports: Sequence[dict[str, Any]]) -> Reads:
    """What the workers of one server read."""
    reads: Reads = {}
    for report in reports:
        for name, index, part, total in report["reads"]:
            box = (tuple(part[0]), tuple(part[1]))
            if reads.setdefault((name, index), {}).setdefault(box, total) != total:
                raise WeightSyncError(f"{report['server']}, worker {report['worker']}: {name}{brackets(box)} changed while it was read")
    return reads


def _verify_block(name: str, block: SharedBlock, written: int, read: dict[Box, int]) -> None:
    total = read.get(block.box)
    if total is None and sum(map(size, read)) == size(block.box):
        total = sum(read.values()) % 2**64
    if total not in (None, written):
        raise WeightSyncError(wrong_checksum(block.rank, name, block.box, total, written))
