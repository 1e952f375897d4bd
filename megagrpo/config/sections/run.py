"""Defines the sections `run` and `debug`: a run's name, length, checkpoints, console and profiles; debug dumps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megagrpo.config.sections.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from megagrpo.config.sections.tracker_options import (
    TrackioSection,
    WandbSection,
)

DEFAULT_STEPS = 100


class ProfileSection(Section):
    steps: list[PositiveInt] = []
    """Steps to profile: docs/profiling.md. A profile changes no weight, and no metric except times."""
    tool: Literal["torch", "nsys", "memory"] = "torch"
    """`torch` writes a trace and the longest operations to the run's `profile/`. `nsys` marks the steps for a run under
    Nsight Systems. `memory` writes the allocations of GPU memory. The last two need a GPU."""
    ranks: list[NonNegativeInt] = []
    """Ranks to profile; empty: all."""


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)] = "grpo"
    """Name of the run; its files go to `output_dir/name`."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 42
    """Seeds the prompt order, the sampling requests and torch."""
    deterministic: bool = False
    """Make every run with the same seed and layout bitwise equal on GPUs, which is slower (docs/audit.md). On a CPU
    runs are always bitwise equal."""
    max_steps: PositiveInt | None = None
    """Number of steps; a step generates, scores, trains and syncs weights. Takes precedence over `num_train_epochs`.
    Empty: as many as `num_train_epochs` needs; 100 if both are empty."""
    num_train_epochs: PositiveFloat | None = None
    """Passes over `data.train`, fractions allowed; used if `max_steps` is empty. Additional prompts of
    `algorithm.dynamic_sample` do not count."""
    save_steps: NonNegativeInt = 0
    """Write a checkpoint every this many steps; 0 writes one at the end only."""
    async_save: bool = False
    """Continue training while a checkpoint is written. Needs host memory for a copy of it. At its end the run waits for
    the last checkpoint."""
    save_total_limit: PositiveInt = 2
    """How many checkpoints to keep; the oldest are deleted after a newer one is complete."""
    callbacks: list[str] = []
    """Classes with your code between steps, as `path/file.py:Class` or `package.module:Class`: docs/callbacks.md."""
    nodes: PositiveInt = 1
    """Number of nodes of the job that `megagrpo submit` requests (docs/slurm.md)."""
    time_limit: Annotated[str, Field(pattern=r"^(\d{1,4}-)?\d{1,5}:[0-5]\d:[0-5]\d$")] | None = None
    """Time limit of one job, as `[days-]hours:minutes:seconds`. After the last step that fits, the run saves and ends
    with exit code 85. `megagrpo submit` requests this limit from Slurm. In a Slurm job Slurm's own limit applies."""
    resume: bool | Literal["other_data"] = False
    """Continue from the newest complete checkpoint of this run (also `--resume`); fails if there is none, or if the
    rows of `data.train` have changed. other_data: rows that were appended join the epoch in progress; other changed
    data begins the epoch again."""
    overwrite: bool = False
    """Allow a new start in a run folder that already holds metrics or checkpoints; the old folder is renamed."""
    log_completions_steps: NonNegativeInt = 1
    """Print a sample completion, and send the step's completions to the trackers, every this many steps; 0: never.
    `completions.jsonl` always holds all completions."""
    log_tokens_groups: NonNegativeInt = 2
    """Groups per step whose tokens are written to `tokens.jsonl` for `megagrpo report` (docs/report.md): those with the
    largest range of advantages. 0: none."""
    keep_rollouts_gb: NonNegativeFloat = 10.0
    """Keep the tokens and log-probs of all responses in the run's `rollouts/`, up to this size, so that another run can
    train on them (`rollout.kept`). A token takes about 15 bytes, with its text. 0 keeps none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of console lines and log records. `warning` hides steps and progress. The variable
    MEGAGRPO_LOG_LEVEL takes precedence."""
    progress: bool = True
    """Show progress bars if standard error is a terminal."""
    peak_tflops: PositiveFloat | None = None
    """Peak dense BF16 TFLOP/s of a rank's GPU or CPU, for the metric `mfu`. Empty: the data sheet of a known GPU; for
    other devices `mfu` is not computed."""
    profile: ProfileSection = ProfileSection()
    trackers: list[str] = ["tensorboard"]
    """Where metrics and completions go besides files of the run: tensorboard, wandb, trackio, or your own class as
    `path/file.py:Class` (docs/trackers.md)."""
    wandb: WandbSection = WandbSection()
    """Options of wandb."""
    trackio: TrackioSection = TrackioSection()
    """Options of the tracker trackio."""

    @property
    def num_steps(self) -> int:
        """The number of steps of the run. With `num_train_epochs`, `RunConfig.with_num_prompts` sets it first."""
        assert self.max_steps is not None, "the number of steps depends on the data"
        return self.max_steps

    @model_validator(mode="before")
    @classmethod
    def _steps_without_epochs(cls, values: Any) -> Any:
        """Fill in the default of `max_steps`, which `num_train_epochs` replaces."""
        if isinstance(values, dict) and values.get("max_steps") is None and values.get("num_train_epochs") is None:
            return values | {"max_steps": DEFAULT_STEPS}
        return values


class DebugSection(Section):
    dump_steps: list[PositiveInt] = []
    """Steps to write to the run's `dumps/`, weights included, for `megagrpo audit`. Dumps do not change results."""
