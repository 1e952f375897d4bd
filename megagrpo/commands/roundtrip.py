"""Checks that converting a model to Megatron's format and back changes no byte, and writes a manifest of the model.

    megagrpo roundtrip MODEL
    megagrpo launch 4 roundtrip MODEL --tp 2 --ep 2 --manifest model.json --scratch /data

Converts MODEL in both directions in --scratch, which temporarily needs twice the model's size. Compares names, dtypes, shapes and bytes of
all tensors, the files byte by byte, and the index. The manifest holds the sha256 of every tensor and file. Exit code 0: everything is
equal, except tensors that the architecture does not use, which are counted. Exit code 1: there are differences, and the first ones are
printed. Exit code 2: the model cannot be converted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import argparse
import hashlib
import json
import shutil
import tempfile
from typing import Any

from megagrpo.commands.layout_arguments import add_layout_arguments, run_in_layout
from megagrpo.bridge.convert import export_hf, import_hf
from megagrpo.bridge.load import Checkpoint, counted
from megagrpo.bridge.tensor_files import NAMES
from megagrpo.families.config import load_hf_config
from megagrpo.families.sources import INDEX, resolve_model
from megagrpo.parallel.agree import on_first_rank
from megagrpo.parallel.layout import Layout

SHOWN = 5  # limit of the differences that are printed


def check(model: str, manifest: Path | None, scratch: Path, layout: Layout) -> bool:
    """Return whether MODEL is unchanged after both conversions. Rank 0 writes the manifest and prints differences. Collective."""
    source = resolve_model(model)
    folder = on_first_rank(layout, lambda: Path(tempfile.mkdtemp(prefix="roundtrip_", dir=scratch)))
    try:
        import_hf(str(source), folder / "megatron", layout)
        export_hf(folder / "megatron", folder / "hf", None, layout)
        return on_first_rank(layout, lambda: _report(source, folder / "hf", manifest or Path(f"{source.name}.manifest.json")))
    finally:
        if layout.world_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _report(source: Path, back: Path, manifest: Path) -> bool:
    before, after = describe(source), describe(back)
    left_out = Checkpoint(source).left_out(load_hf_config(source))
    changes = differences(before, after, left_out)
    verdict = dict(model=str(source), identical=not changes and not left_out, left_out=left_out, differences=changes)
    manifest.write_text(json.dumps(verdict | before, indent=1))
    if left_out:
        print(f"dropped, because the architecture does not use it: {counted(left_out)}")
    for line in changes[:SHOWN]:
        print(line)
    total = sum(tensor["nbytes"] for tensor in before["tensors"].values())
    converted = f"{len(before['tensors']) - len(left_out)} of them " if left_out else ""
    outcome = f"{len(changes)} differences" if changes else f"{converted}unchanged after both conversions"
    print(f"{len(before['tensors'])} tensors, {total / 1e9:.3f} GB, {len(before['files'])} files: {outcome}; manifest: {manifest}")
    return not changes


def describe(folder: Path) -> dict[str, Any]:
    """Describe a folder's safetensors files and index: dtype, shape, file and sha256 of every tensor, and the sha256 of every file."""
    checkpoint = Checkpoint(folder)
    tensors = {}
    for name, file in checkpoint.where.items():
        entry = checkpoint.entry(name)
        digest = hashlib.sha256(checkpoint.bytes_of(name)).hexdigest()
        tensors[name] = dict(dtype=NAMES[entry.dtype], shape=list(entry.shape), nbytes=entry.nbytes, file=file, sha256=digest)
    files = {}
    for name in [*checkpoint.files, *([INDEX] if checkpoint.index is not None else [])]:
        with open(folder / name, "rb") as stored:
            files[name] = hashlib.file_digest(stored, "sha256").hexdigest()
    return dict(files=files, tensors=tensors)


def differences(before: dict[str, Any], after: dict[str, Any], left_out: list[str]) -> list[str]:
    """Return one line for each changed tensor, then one for each changed file. Files that lost a dropped tensor are not compared."""
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
    return lines + [f"{name}: the files differ" for name in names if before["files"].get(name) != after["files"].get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder, hub name, or package:NAME")
    parser.add_argument("--manifest", type=Path, help="file to write (default: NAME.manifest.json here)")
    parser.add_argument("--scratch", type=Path, default=Path(), help="folder with room for the model twice (default: this one)")
    add_layout_arguments(parser)
    args = parser.parse_args()
    outcome: list[bool] = []
    failed = run_in_layout(args, lambda layout: outcome.append(check(args.model, args.manifest, args.scratch, layout)))
    return failed or int(not outcome[0])


if __name__ == "__main__":
    sys.exit(main())
