"""Defines the sections `run` and `debug`: the run's name, length, checkpoints and logs, and debug dumps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.section import NonNegativeInt, PositiveInt, Section


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "grpo"
    """Name of the run; its files go to `output_dir/name`."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 42
    """Seeds the prompt order, the sampling requests and torch."""
    deterministic: bool = False
    """Make every run with the same seed and layout bitwise equal on GPUs, which is slower (docs/audit.md). On a CPU runs are always bitwise
    equal."""
    max_steps: PositiveInt = 100
    """Outer iterations: generate, score, train, sync."""
    save_steps: NonNegativeInt = 0
    """Write a checkpoint every this many steps; 0 writes one at the end only."""
    async_save: bool = False
    """Continue training while a checkpoint is written, which costs a copy of the checkpoint in host memory. The run waits for the last
    checkpoint."""
    save_total_limit: PositiveInt = 2
    """How many checkpoints to keep; the oldest are deleted after a newer one is complete."""
    callbacks: list[str] = []
    """Classes with your own code between steps, as `path/file.py:Class` or `package.module:Class`: docs/callbacks.md."""
    nodes: PositiveInt = 1
    """Number of nodes of the job that `megagrpo submit` requests (docs/slurm.md)."""
    time_limit: Annotated[str, Field(pattern=r"^(\d{1,4}-)?\d{1,5}:[0-5]\d:[0-5]\d$")] | None = None
    """Time limit of one job, as `[days-]hours:minutes:seconds`. Before the limit the run saves after a step and ends with exit code 85.
    A limit that Slurm sets takes precedence; `megagrpo submit` requests this one from Slurm."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run (also `--resume`); an error without a checkpoint."""
    overwrite: bool = False
    """Allow a new start in a run folder that already holds metrics or checkpoints; the old contents are moved aside."""
    log_completions_steps: NonNegativeInt = 1
    """Print a sample completion every this many steps; 0 never prints. `completions.jsonl` always holds all completions."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send metrics to Weights & Biases; `offline` needs no account and can be synced later."""


class DebugSection(Section):
    dump_steps: list[PositiveInt] = []
    """Steps to write to the run's `dumps/`, weights included, for `megagrpo audit`. Dumps do not change the run's results."""
