"""What a run is called, how long it goes on and what it leaves behind; debugging."""

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
    """Compute the same bits in every run of one seed and layout, on GPUs too, where that is slower (docs/audit.md). On a CPU they are the
    same anyway."""
    max_steps: PositiveInt = 100
    """Outer iterations: generate, score, train, sync."""
    save_steps: NonNegativeInt = 0
    """Write a checkpoint every so many steps; 0 writes one at the end only."""
    async_save: bool = False
    """Go on training while a checkpoint is written: costs a copy of it in host memory. The last one is waited for."""
    save_total_limit: PositiveInt = 2
    """How many checkpoints to keep; the oldest are deleted after a newer one is complete."""
    callbacks: list[str] = []
    """Classes with your own code between steps, as `path/file.py:Class` or `package.module:Class`: docs/callbacks.md."""
    nodes: PositiveInt = 1
    """Machines of the job that `launch/submit.py` asks for (docs/slurm.md)."""
    time_limit: Annotated[str, Field(pattern=r"^(\d{1,4}-)?\d{1,5}:[0-5]\d:[0-5]\d$")] | None = None
    """How long a run may take at one go, as `[days-]hours:minutes:seconds`: before that it saves, after a step, and ends with exit code 85.
    Where Slurm sets a limit, that one counts, and `launch/submit.py` asks for this one."""
    resume: bool = False
    """Continue from the newest complete checkpoint of this run (also `--resume`); an error when there is none."""
    overwrite: bool = False
    """Allow a fresh start in a run folder that already holds metrics or checkpoints: what is there is moved aside."""
    log_completions_steps: NonNegativeInt = 1
    """Print a sample completion every so many steps; 0 never prints. `completions.jsonl` always holds all of them."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Send metrics to Weights & Biases; `offline` needs no account and can be synced later."""


class DebugSection(Section):
    dump_steps: list[PositiveInt] = []
    """Steps to write to `dumps/` of the run, weights included, for `megagrpo audit`. The run itself stays the same."""
