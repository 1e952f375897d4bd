"""Converts a Hugging Face folder to or from Megatron's distributed checkpoint, with one parameter at a time in memory.

Both directions resume after a killed attempt. The resulting folder is complete or absent. `check` converts there and
back, and compares every byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig, architecture_differences, load_hf_config
from megagrpo.families.weight_sources import INDEX, MEGATRON_LM, resolve_model
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.progress_hook import SILENT, Progress, Task
from megagrpo.platform.process.terminal import show, warn
from megagrpo.policy.images.trained_tower import train_tower
from megagrpo.weights.blocks.parameter_blocks import fill
from megagrpo.weights.bridge.adapter_files import ADAPTER_FILES
from megagrpo.weights.bridge.hf_export import Parameters, Stream, exhaust, find_sources, shapes, stream
from megagrpo.weights.bridge.hf_files import (
    Files,
    Rounded,
    Writer,
    carry,
    copy_side_files,
    files_for,
    files_of,
    narrows,
)
from megagrpo.weights.bridge.load import Checkpoint, counted
from megagrpo.weights.bridge.megatron_io import HF_FILES, Part, Structure, check_is_checkpoint, save_frame, structure
from megagrpo.weights.files.file_checksums import CHECKSUMS, verify_others
from megagrpo.weights.files.gpt_checkpoint import RELEASE, GptKeys, check_arguments, newest_iteration
from megagrpo.weights.files.partial_files import Unfinished
from megagrpo.weights.files.tensor_files import NAMES
from megagrpo.weights.files.torch_dist import ARCHIVE_BYTES, Piece, PieceWriter, StoredTensors, add_pieces

_COMMIT = 2**28  # bytes between two commits: a kill loses at most this much work


def import_hf(model: str, out: Path, layout: Layout, progress: Progress = SILENT, megatron_lm: bool = False) -> None:
    """Write `out`: Megatron's files, and in `out`/hf the files that an export needs beside the weights. Collective.

    With `megatron_lm`, `out` is a folder of Megatron-LM's checkpoints with one, `release`, that its GPTModel loads.
    Every parameter is stored in a dtype that holds its tensors without loss. Raises ValueError, naming file and tensor,
    when the model is damaged, does not fit its config.json or holds a NaN. Raises ValueError when `out` is not empty.
    Raises OSError when the disk is too small or cannot be written. Ranks without an error of their own raise RankError.
    `progress` shows the bytes of this rank.
    """
    source = run_own_and_agree(layout, lambda: resolve_model(model, "MODEL"))
    hf_config = load_hf_config(source)
    checkpoint = run_own_and_agree(layout, lambda: Checkpoint(source))
    keys = run_own_and_agree(layout, lambda: GptKeys.to_write(hf_config)) if megatron_lm else None
    own = run_own_and_agree(layout, lambda: structure(hf_config, layout, keys))
    blocks = [block for part in own.parts for block in part.blocks]
    run_own_and_agree(layout, lambda: checkpoint.check(blocks, hf_config))
    on_first_rank(layout, lambda: checkpoint.check_head(hf_config))
    if layout.world_rank == 0:
        checkpoint.say_untrained(hf_config)
    with _unfinished(out, layout, source, megatron_lm=megatron_lm) as folder:
        weights = folder.path / RELEASE if megatron_lm else folder.path
        on_first_rank(layout, lambda: weights.mkdir(exist_ok=True))
        with progress.task(f"writing {out.name}") as task:
            pieces = _import_tensors(own, keys, checkpoint, folder, weights, layout, task)
        everyone, frame = layout.all_gather_objects(pieces), folder.path / "frame"
        on_first_rank(layout, lambda: _empty(frame))
        save_frame(frame, own, hf_config if megatron_lm else None)

        def finish() -> None:
            _empty(folder.path / HF_FILES)
            carry(source, files_of(source), folder.path / HF_FILES, checkpoint.untrained(hf_config), whole=True)
            add_pieces(frame, [piece for pieces in everyone for piece in pieces])
            for file in frame.iterdir():
                file.rename(weights / file.name)
            remove(frame)
            if megatron_lm:
                (folder.path / MEGATRON_LM).write_text(RELEASE)

        on_first_rank(layout, finish)


def _empty(folder: Path) -> None:
    """Create the folder empty: a killed attempt may have left files in it."""
    remove(folder)
    folder.mkdir()


def _import_tensors(
    own: Structure,
    keys: GptKeys | None,
    checkpoint: Checkpoint,
    folder: Unfinished,
    weights: Path,
    layout: Layout,
    task: Task,
) -> list[Piece]:
    written = [part for part in own.parts if is_main_replica(part.stored.replica_id)]
    mine = _dtypes_of(written, checkpoint, own, layout)
    sizes = {part.name: math.prod(part.shape) * dtype.itemsize for part, dtype in mine.items()}
    writer = run_own_and_agree(layout, lambda: PieceWriter(weights, layout.world_rank, folder.journal))
    left = {part: dtype for part, dtype in mine.items() if part.name not in writer.done}
    folder.check_space(sum(sizes[part.name] + 2 * ARCHIVE_BYTES for part in left))
    done = sum(sizes[name] for name in writer.done)

    def write() -> None:
        task.expect(sum(sizes.values()), "B", done)
        for part, dtype in left.items():
            value = torch.empty(part.shape, dtype=dtype)
            fill(value, part.blocks, checkpoint.read)
            stored = part.pieces(value)
            writer.write(part.name, [*stored, *(keys.also_as(stored) if keys else ())])
            task.advance(sizes[part.name])
        writer.close()

    run_own_and_agree(layout, write)
    return writer.pieces


def _dtypes_of(parts: list[Part], checkpoint: Checkpoint, own: Structure, layout: Layout) -> dict[Part, torch.dtype]:
    """Return for each part the narrowest dtype that holds all tensors stored under its key without loss. Collective: a
    stacked tensor has the layers of all ranks."""
    mine: dict[str, torch.dtype] = {}
    for part in parts:
        dtypes = [checkpoint.entry(block.name).dtype for block in part.blocks] or [own.dtype]
        key = part.places[0].key
        mine[key] = reduce(torch.promote_types, dtypes, mine.get(key, dtypes[0]))
    common: dict[str, torch.dtype] = {}
    for of_rank in layout.all_gather_objects(mine):
        for key, dtype in of_rank.items():
            common[key] = torch.promote_types(dtype, common.get(key, dtype))
    return {part: common[part.places[0].key] for part in parts}


def export_hf(
    checkpoint: Path,
    out: Path,
    model: str | None,
    layout: Layout,
    progress: Progress = SILENT,
    dtype: torch.dtype | None = None,
) -> Rounded:
    """Write `out`: the weights of a distributed checkpoint, with config and tokenizer, in the files of the original
    model. Collective. Returns, on rank 0, between which dtypes values have been rounded.

    `dtype` None means the dtypes of the original model. `model` names the original Hugging Face model, or a folder with
    config.json alone; None takes the files in the checkpoint. Raises ValueError when the checkpoint has no such files,
    holds only an adapter, is damaged, does not fit the model, holds a NaN or a value that is too large for the dtype,
    or when `out` is not empty. Raises OSError when the disk is too small or cannot be written. Ranks without an error
    of their own raise RankError. `progress` shows the bytes on rank 0.
    """
    hf_files = checkpoint / HF_FILES
    checkpoint = _checked(checkpoint, out, model is not None, layout)
    source = run_own_and_agree(layout, lambda: _architecture(model)) if model else hf_files
    hf_config = load_hf_config(source)
    if model is not None and layout.world_rank == 0:
        _warn_of_other_numbers(hf_config, hf_files, model)
    stored = run_own_and_agree(layout, lambda: StoredTensors(checkpoint))
    hf_config = train_tower(hf_config) if stored.has_tower else hf_config
    if (keys := GptKeys.of(stored, hf_config)) is not None:
        on_first_rank(layout, lambda: check_arguments(stored, hf_config, str(source)))
    own = run_own_and_agree(layout, lambda: structure(hf_config, layout, keys))
    run_own_and_agree(layout, lambda: _check_stored(own, stored))
    # one entry: gate and up of a parameter are adjacent
    read = lru_cache(maxsize=1)(lambda part: _read_stored(part, stored))
    parameters: Parameters = [
        (part.name, StoredParameter(part, _stored_dtype(part, stored), read), part.blocks) for part in own.parts
    ]
    sources = find_sources(parameters, layout)
    files, copies, untrained = on_first_rank(layout, lambda: files_for(shapes(sources), source, hf_config, dtype))
    rounded: Rounded = set()
    with _unfinished(out, layout, checkpoint, source, dtype=dtype) as folder:
        done = set(layout.broadcast_object(folder.journal.lines))
        # of an earlier attempt: taken for rounded
        pairs = {(sources[name].dtype, files.entries[name].dtype) for name in done}
        tensors = stream(parameters, layout, sources, [name for name in sources if name not in done])

        def write() -> None:
            if layout.world_rank == 0:
                with progress.task(f"writing {out.name}") as task:
                    with Writer(folder.path, files, copies) as writer:
                        _write_tensors(tensors, folder, files, writer, done, task)
                        writer.copy_untrained(untrained, source, task)
                        writer.sync()
                    rounded.update(writer.rounded)
                rounded.update(pair for pair in pairs if narrows(*pair))
                copy_side_files(source, folder.path, dtype)

        exhaust(write, tensors, layout)
    return rounded


def _architecture(model: str) -> Path:
    """Return the folder of `model`, which may hold config.json and no weights: an export takes them from its
    checkpoint."""
    folder = Path(os.path.expanduser(model))
    if (folder / "config.json").is_file() and not (folder / INDEX).exists() and not any(folder.glob("*.safetensors")):
        return folder
    return resolve_model(model, "--model")


def _checked(checkpoint: Path, out: Path, has_model: bool, layout: Layout) -> Path:
    """Return the checkpoint, or its newest iteration. Raises ValueError if it cannot be exported. Collective."""
    if (checkpoint / ADAPTER_FILES).is_dir():
        fix = f"merge it: megagrpo merge {checkpoint / ADAPTER_FILES} {out}"
        raise ValueError(f"{checkpoint} has an adapter but no weights; {fix}")
    newest = newest_iteration(checkpoint)
    if not has_model and not (checkpoint / HF_FILES).is_dir():
        why = f"has no {HF_FILES} folder with config.json; name the original model with --model"
        raise ValueError(f"{newest} {why}")
    check_is_checkpoint(newest)
    if (newest / CHECKSUMS).is_file():
        on_first_rank(layout, lambda: verify_others(newest))
    return newest


def _warn_of_other_numbers(hf_config: HfConfig, hf_files: Path, model: str) -> None:
    """Print a line if `model` computes differently than the model whose config.json is in a checkpoint's `hf_files`."""
    try:
        own = load_hf_config(hf_files)
    except ValueError:  # missing or damaged: `model` replaces it
        return
    if names := architecture_differences(own, hf_config):
        warn(
            f"warning: --model: {model} has another {', '.join(names)} than the model of {hf_files.parent}, and the "
            "export computes with it; leave --model out to export the model as it was trained"
        )


def _write_tensors(
    tensors: Stream, folder: Unfinished, files: Files, writer: Writer, done: Iterable[str], task: Task
) -> None:
    total, before = (sum(files.entries[name].nbytes for name in names) for names in (files.entries, done))
    task.expect(total, "B", before)
    pending: list[str] = []
    size = 0
    for name, tensor in tensors:
        nbytes = writer.write(name, tensor)
        task.advance(nbytes)
        pending, size = [*pending, name], size + nbytes
        if size > _COMMIT:
            writer.sync()
            folder.journal.write(pending)
            pending, size = [], 0


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of this rank in a distributed checkpoint. Each access to `data` reads it."""

    part: Part
    dtype: torch.dtype
    read: Callable[[Part], Tensor]

    @property
    def data(self) -> Tensor:
        """The values of this rank, in the shape of `part`."""
        return self.read(self.part)


def _read_stored(part: Part, stored: StoredTensors) -> Tensor:
    if isinstance(part.stored, ShardedTensor) and (mapped := stored.mapped(part.stored)) is not None:
        return mapped
    value = torch.zeros(part.shape, dtype=_stored_dtype(part, stored))
    for piece in part.pieces(value):
        stored.read_into(piece)
    return value


def _stored_dtype(part: Part, stored: StoredTensors) -> torch.dtype:
    return stored.dtype(part.places[0].key)


def _check_stored(own: Structure, stored: StoredTensors) -> None:
    for part in own.parts:
        for piece in part.places:
            stored.check(piece, rows=max((rows for block in part.blocks for rows in block.shape[:1]), default=0))


@contextlib.contextmanager
def _unfinished(out: Path, layout: Layout, *sources: Path, **form: Any) -> Iterator[Unfinished]:
    """Yield the folder that becomes `out`. An error removes it. After a kill or an interrupt, the next attempt from the
    same sources to the same `form` (dtype, keys) resumes it."""
    p = layout.parallel
    sizes = (layout.world_size, p.tp, p.pp, p.vpp, p.pipeline_layers, p.ep, p.expert_tp)
    named = [[str(source), fingerprint(source)] for source in sources]
    folder = Unfinished(out, layout, dict(sources=named, layout=str(sizes), form=str(form)))
    try:
        yield folder
        folder.publish()
    except (ValueError, OSError, RankError):
        folder.discard()
        raise


def fingerprint(folder: Path) -> str:
    """Return a hash of the names, sizes and times of a folder's files, not of their bytes."""
    files = [(str(file.relative_to(folder)), file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    return sha256(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]).encode()).hexdigest()


def export_alone(checkpoint: Path, out: Path, progress: Progress = SILENT, dtype: torch.dtype | None = None) -> Rounded:
    """Run `export_hf` in a world of this process only, with the model files of the checkpoint."""
    layout = init_layout(ParallelSection())
    try:
        return export_hf(checkpoint, out, None, layout, progress, dtype)
    finally:
        layout.close()


SHOWN_DIFFERENCES = 5  # limit of the differences that are printed


def check(model: str, manifest: Path | None, scratch: Path, layout: Layout) -> bool:
    """Return whether both conversions preserve MODEL. Rank 0 writes the manifest and prints differences. Collective."""
    source = resolve_model(model)
    folder = on_first_rank(layout, lambda: Path(tempfile.mkdtemp(prefix="roundtrip_", dir=scratch)))
    try:
        import_hf(str(source), folder / "megatron", layout)
        export_hf(folder / "megatron", folder / "hf", None, layout)
        manifest = manifest or Path(f"{source.name}.manifest.json")
        return on_first_rank(layout, lambda: _report(source, folder / "hf", manifest))
    finally:
        if layout.world_rank == 0:
            remove(folder)


def _report(source: Path, back: Path, manifest: Path) -> bool:
    before, after = describe(source), describe(back)
    checkpoint = Checkpoint(source)
    untrained = checkpoint.untrained(load_hf_config(source))
    if checkpoint.views:  # the export's files hold the tensors that are computed from these files
        before["files"] = after["files"] = {}
    changes = differences(before, after)
    verdict = dict(
        model=str(source), identical=not (changes or checkpoint.views), untrained=untrained, differences=changes
    )
    manifest.write_text(json.dumps(verdict | before, indent=1))
    if untrained:
        show(f"kept as loaded, not trained: {counted(untrained)}")
    for line in changes[:SHOWN_DIFFERENCES]:
        show(line)
    total = sum(tensor["nbytes"] for tensor in before["tensors"].values())
    outcome = f"{len(changes)} differences" if changes else "unchanged after both conversions"
    counts = f"{len(before['tensors'])} tensors, {total / 1e9:.3f} GB, {len(before['files'])} files"
    show(f"{counts}: {outcome}; manifest: {manifest}")
    return not changes


def describe(folder: Path) -> dict[str, Any]:
    """Describe a folder's safetensors and index: each tensor's dtype, shape, file and sha256, each file's sha256."""
    checkpoint = Checkpoint(folder)
    tensors = {}
    for name, file in checkpoint.where.items():
        entry = checkpoint.entry(name)
        digest = hashlib.sha256(checkpoint.bytes_of(name)).hexdigest()
        of_tensor = dict(dtype=NAMES[entry.dtype], shape=list(entry.shape), nbytes=entry.nbytes)
        tensors[name] = of_tensor | dict(file=file, sha256=digest)
    files = {}
    for name in [*checkpoint.files, *([INDEX] if checkpoint.index is not None else [])]:
        with open(folder / name, "rb") as stored:
            files[name] = hashlib.file_digest(stored, "sha256").hexdigest()
    return dict(files=files, tensors=tensors)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line per changed tensor, then per changed file."""
    lines = []
    for name, was in before["tensors"].items():
        now = after["tensors"].get(name)
        if now is None:
            lines.append(f"{name} ({was['file']}): missing")
        lines += [
            f"{name} ({was['file']}): {key} changed from {was[key]} to {now[key]}"
            for key in was
            if now is not None and now[key] != was[key]
        ]
    lines += [f"{name} ({now['file']}): new" for name, now in after["tensors"].items() if name not in before["tensors"]]
    names = sorted(before["files"].keys() | after["files"].keys())
    differ = [name for name in names if before["files"].get(name) != after["files"].get(name)]
    return lines + [f"{name}: the files differ" for name in differ]
