"""Replays: a run is made again from what its folder holds, and both are compared (docs/kept_rollouts.md)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megagrpo.config import ConfigError
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.checkpoints.run_files import CHECKPOINTS, METRICS, RESOLVED, checkpoints
from megagrpo.records.rows.kept_rollouts import ROLLOUTS
from megagrpo.records.rows.run_starts import STARTS_FILE
from megagrpo.weights.files.torch_dist import StoredTensors

REPLAY_FOLDER = "replay"  # the replay's folder, in that of its run
# metrics of the machine or of the servers, not of the computation
_OF_MACHINE = re.compile(
    r"^(time|idle|weight_sync|memory|async|checkpoint)/|second|^mfu|wall_time|^memory_gb|^weight_version|^mismatch/"
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def prepare(folder: Path, first: int | None, last: int | None, generate: bool) -> tuple[list[str], int]:
    """Prepare the folder of a replay, which begins after step `first` and ends after step `last`; None: with the run.
    Returns what replaces values in the run's config, and the number of ranks. Raises ConfigError for a run that cannot
    be made again."""
    starts = folder / STARTS_FILE
    if not (folder / RESOLVED).is_file() or not starts.is_file():
        raise ConfigError(f"RUN: {folder} is no folder of a run: it has no {RESOLVED} or no {STARTS_FILE}")
    if not generate and not (folder / ROLLOUTS).is_dir():
        raise ConfigError(
            f"RUN: {folder} has kept no rollouts (run.keep_rollouts_gb was 0); --generate generates them again"
        )
    if last is not None and last <= (first or 0):
        raise ConfigError(f"--to: step {last} is not after step {first or 0}; name a later step")
    new = folder.absolute() / REPLAY_FOLDER
    if new.exists():
        raise ConfigError(f"RUN: {new} holds an earlier replay; remove it first")
    overrides = [
        f"run.output_dir={folder.absolute()}",
        f"run.name={REPLAY_FOLDER}",
        "run.trackers=[]",
        "run.callbacks=[]",
    ]
    overrides += ["evaluation.keep_best=null", f"run.resume={'false' if first is None else 'true'}"]
    overrides += [] if generate else [f"rollout.kept.path={folder.absolute()}"]
    overrides += [] if last is None else [f"rollout.kept.to_step={last}"]
    if first is not None:
        _start_from(folder, first, new)
    start = _last_line(starts)
    if threads := start.get("threads"):  # the order of a CPU's sums depends on it
        ENVIRONMENT["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return overrides, start["ranks"]


def _start_from(folder: Path, step: int, new: Path) -> None:
    """Copy the run's checkpoint after `step` into the new folder, as links where the file system has them."""
    source = {int(path.name.removeprefix("step_")): path for path in checkpoints(folder / CHECKPOINTS)}
    if step not in source:
        has = ", ".join(map(str, source)) or "none"
        raise ConfigError(f"--from: {folder} has no checkpoint after step {step}; it has {has}")

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(source[step], new / CHECKPOINTS / source[step].name, copy_function=link)


def compare(old: Path, new: Path, first: int) -> tuple[list[str], bool]:
    """Compare the steps after `first` that both runs have, then the newest checkpoint that both have.
    Returns lines that say where they are equal and where they differ, and whether they differ."""
    lines, found = [*_machines(old, new)], False
    one, other = _steps(old), _steps(new)
    steps = [step for step in sorted(one.keys() & other.keys()) if step > first]
    if not steps:
        return [*lines, "no step is in both runs"], True
    for step in steps:
        a, b = one[step], other[step]
        names = [name for name in a.keys() & b.keys() if not _OF_MACHINE.search(name)]
        if unequal := sorted(name for name in names if a[name] != b[name]):
            pairs = ", ".join(f"{name} {a[name]} and {b[name]}" for name in unequal[:3])
            lines.append(f"step {step} differs in {len(unequal)} of {len(names)} metrics: {pairs}")
            found = True
            break
    else:
        lines.append(f"steps {steps[0]} to {steps[-1]}: all metrics are equal, except times and memory")
    both = {path.name for path in checkpoints(old / CHECKPOINTS)} & {p.name for p in checkpoints(new / CHECKPOINTS)}
    if common := sorted(name for name in both if int(name.removeprefix("step_")) > first):
        pair = StoredTensors(old / CHECKPOINTS / common[-1]), StoredTensors(new / CHECKPOINTS / common[-1])
        differing = list(differing_tensors(*pair))
        lines += [f"{common[-1]}: {name} differs: {what}" for name, what in differing[:10]]
        lines.append(f"{common[-1]}: {len(differing)} of {len(pair[0].keys())} tensors differ")
        found = found or bool(differing)
    else:
        lines.append("no checkpoint is in both runs, so weights were not compared")
    return lines, found


def differing_tensors(one: StoredTensors, other: StoredTensors) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor whose bits differ, and how: missing, of another shape, or by how many ulp."""
    known = {*other.keys()}
    for name in sorted({*one.keys(), *known}):
        if name not in known or name not in one.keys():
            yield name, f"only {(other if name in known else one).folder} has it"
            continue
        a, b = one.whole(name), other.whole(name)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield name, f"{a.dtype} {[*a.shape]} and {b.dtype} {[*b.shape]}"
        elif not torch.equal(_bits(a), _bits(b)):
            apart = (_bits(a).long() - _bits(b).long()).abs()
            yield name, f"{int((apart > 0).sum())} of {a.numel()} elements, by up to {int(apart.max())} ulp"


def _bits(values: Tensor) -> Tensor:
    """Return the elements as integers in the order of their values; neighbours differ by 1."""
    whole = values.contiguous().view(-1).view(_INTEGERS[values.element_size()])
    lowest = torch.iinfo(whole.dtype).min
    return torch.where(whole < 0, lowest - whole, whole) if values.dtype.is_floating_point else whole


def _machines(old: Path, new: Path) -> Iterator[str]:
    """Yield what differs between the machines of both runs: device, versions, ranks."""
    one, other = _last_line(old / STARTS_FILE), _last_line(new / STARTS_FILE)
    then, now = (row["versions"] | {key: row.get(key) for key in ("device", "threads")} for row in (one, other))
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            yield f"note: {name} was {then.get(name)}, and is {now.get(name)} now"


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    with open(folder / METRICS, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row for row in rows if "grad_norm" in row}


def _last_line(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return row
