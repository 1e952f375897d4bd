"""Converts a model to Megatron's format and back, and compares every byte: `megagrpo roundtrip`."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from megagrpo.models.bridge.conversion import export_hf, import_hf
from megagrpo.models.bridge.load import Checkpoint, counted
from megagrpo.models.bridge.tensor_files import NAMES
from megagrpo.models.families.hf_config import load_hf_config
from megagrpo.models.families.weight_sources import INDEX, resolve_model
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.removal import remove
from megagrpo.platform.process.terminal import show

SHOWN = 5  # limit of the differences that are printed


def check(model: str, manifest: Path | None, scratch: Path, layout: Layout) -> bool:
    """Return whether MODEL is unchanged after both conversions. Rank 0 writes the manifest and prints differences.
    Collective."""
    source = resolve_model(model)
    folder = on_first_rank(layout, lambda: Path(tempfile.mkdtemp(prefix="roundtrip_", dir=scratch)))
    try:
        import_hf(str(source), folder / "megatron", layout)
        export_hf(folder / "megatron", folder / "hf", None, layout)
        return on_first_rank(
            layout, lambda: _report(source, folder / "hf", manifest or Path(f"{source.name}.manifest.json"))
        )
    finally:
        if layout.world_rank == 0:
            remove(folder)


def _report(source: Path, back: Path, manifest: Path) -> bool:
    before, after = describe(source), describe(back)
    left_out = Checkpoint(source).left_out(load_hf_config(source))
    changes = differences(before, after, left_out)
    verdict = dict(model=str(source), identical=not changes and not left_out, left_out=left_out, differences=changes)
    manifest.write_text(json.dumps(verdict | before, indent=1))
    if left_out:
        show(f"dropped, because the architecture does not use it: {counted(left_out)}")
    for line in changes[:SHOWN]:
        show(line)
    total = sum(tensor["nbytes"] for tensor in before["tensors"].values())
    converted = f"{len(before['tensors']) - len(left_out)} of them " if left_out else ""
    outcome = f"{len(changes)} differences" if changes else f"{converted}unchanged after both conversions"
    show(
        f"{len(before['tensors'])} tensors, {total / 1e9:.3f} GB, {len(before['files'])} files: {outcome}; manifest: "
        f"{manifest}"
    )
    return not changes


def describe(folder: Path) -> dict[str, Any]:
    """Describe a folder's safetensors files and index: dtype, shape, file and sha256 of every tensor, and the sha256 of
    every file."""
    checkpoint = Checkpoint(folder)
    tensors = {}
    for name, file in checkpoint.where.items():
        entry = checkpoint.entry(name)
        digest = hashlib.sha256(checkpoint.bytes_of(name)).hexdigest()
        tensors[name] = dict(
            dtype=NAMES[entry.dtype], shape=list(entry.shape), nbytes=entry.nbytes, file=file, sha256=digest
        )
    files = {}
    for name in [*checkpoint.files, *([INDEX] if checkpoint.index is not None else [])]:
        with open(folder / name, "rb") as stored:
            files[name] = hashlib.file_digest(stored, "sha256").hexdigest()
    return dict(files=files, tensors=tensors)


def differences(before: dict[str, Any], after: dict[str, Any], left_out: list[str]) -> list[str]:
    """Return one line for each changed tensor, then one for each changed file. Files that lost a dropped tensor are not
    compared."""
    lines = []
    for name, was in before["tensors"].items():
        now = after["tensors"].get(name)
        if now is None and name not in left_out:
            lines.append(f"{name} ({was['file']}): missing")
        lines += [
            f"{name} ({was['file']}): {key} changed from {was[key]} to {now[key]}"
            for key in was
            if now is not None and now[key] != was[key]
        ]
    lines += [f"{name} ({now['file']}): new" for name, now in after["tensors"].items() if name not in before["tensors"]]
    changed = {before["tensors"][name]["file"] for name in left_out} | ({INDEX} if left_out else set())
    names = sorted((before["files"].keys() | after["files"].keys()) - changed)
    return lines + [
        f"{name}: the files differ" for name in names if before["files"].get(name) != after["files"].get(name)
    ]
