"""Compares layouts of a run with one process.

By itself it starts the ranks of each layout on this machine. Under megagrpo launch, or any launcher that sets
WORLD_SIZE, every layout must fit the existing ranks, and rank 0 starts the single process beside them.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megagrpo.config import ConfigError, ParallelSection, RunConfig, io, load_config
from megagrpo.families.hf_config import HfConfig, read_raw_config
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner.rules.plan_problems import check
from megagrpo.platform import device
from megagrpo.platform.device import quiet
from megagrpo.platform.parallel.spawn import RankFailed, run_ranks
from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.policy.lora.quantized_base import STORED_BLOCK
from megagrpo.proof.verify.shrink import plainly, random_samples, shrink_config, shrink_model
from megagrpo.proof.verify.verified_step import Outcome, take_step
from megagrpo.proof.verify.verify_compare import Verdict, as_row, as_text, compare, header, summary

MAX_RANKS = 8  # limit of ranks on one machine without GPUs
LAYOUT_SECONDS = 600.0  # limit in seconds for one layout


Timed = tuple[Outcome, float]  # and its seconds


@dataclass(frozen=True)
class Case:
    """One layout to verify: the run's config in that layout, its ranks, and the shrunken config and model."""

    text: str
    config: RunConfig
    ranks: int
    small: RunConfig
    model: HfConfig


def verify_layouts(
    path: Path,
    overrides: Sequence[str],
    layout: Sequence[str] = (),
    ranks: int | None = None,
    full: bool = False,
    tell: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the verdict on each layout, whether it computes what one process does, as `as_row` returns it; under a
    launcher only on rank 0. Raises ConfigError if a layout cannot be tried.

    `layout` has texts such as "tp=2,pp=2,dp=2"; empty: the config's layout. `ranks` is the number of ranks without dp.
    `tell` gets the table, a layout at a time, with `full` every tensor.
    """
    quiet()
    world = int(ENVIRONMENT["WORLD_SIZE"]) if "WORLD_SIZE" in ENVIRONMENT else None
    if world is not None and ranks not in (None, world):
        raise ConfigError(f"--ranks: {ranks} asked for, and WORLD_SIZE says {world}; leave it out under a launcher")
    texts: Sequence[str | None] = layout or [None]
    cases = [_case(path, overrides, text, world or ranks) for text in texts]
    if world is not None:
        return _in_world(cases, full, tell)
    _check_machine(cases)
    # the exception makes run_ranks kill the ranks
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return _verdicts(cases, lambda case: _timed(_on_this_machine, case), OneProcess(), full, tell)
    except KeyboardInterrupt:
        warn("interrupted")
        sys.exit(128 + signal.SIGINT)


def _case(path: Path, overrides: Sequence[str], layout: str | None, ranks: int | None) -> Case:
    """Return a layout's case. Raises ConfigError for invalid text, or if the real model cannot be sharded that way."""
    dp = None
    if layout is not None:
        sizes, dp = parse_layout(layout)
        overrides = [*overrides, f"parallel={sizes}"]
    config = load_config(path, overrides)
    replica = config.parallel.model_parallel_size
    if dp is not None and ranks not in (None, dp * replica):
        counts = f"needs {dp * replica} ranks, and there are {ranks}"
        raise ConfigError(f"--layout {layout}: {counts}; leave dp or --ranks out")
    ranks = ranks or (dp * replica if dp else config.parallel.smallest_world)
    if problems := check(config, ranks, has_data=False).problems:
        raise ConfigError(io.listed(path, problems))
    unit = config.model.width_align if config.model.base_storage == "none" else STORED_BLOCK
    model = shrink_model(read_raw_config(shape_folder(config.model.path)), config.parallel, unit)
    return Case(layout_text(config.parallel, ranks // replica), config, ranks, shrink_config(config), model)


def parse_layout(text: str) -> tuple[str, int | None]:
    """Parse "tp=2,dp=2,sequence_parallel" to ("{tp: 2, sequence_parallel: true}" as the config's `parallel` section, dp
    if given).
    Raises ConfigError for an invalid text."""
    words = [word.strip() for word in re.split(r",(?![^\[]*\])", text)]
    pairs = [word.partition("=")[::2] if "=" in word else (word, "true") for word in words]
    dp = dict(pairs).get("dp")
    if dp is not None and not (dp.isdigit() and int(dp)):
        raise ConfigError(f"--layout {text}: dp must be a positive number (got {dp!r})")
    if "" in dict(pairs):
        raise ConfigError(f"--layout {text}: not a layout; write key=value,key=value, as in tp=2,pp=2,dp=2")
    sizes = ", ".join(f"{key}: {value}" for key, value in pairs if key != "dp")
    return f"{{{sizes}}}", dp and int(dp)


def layout_text(parallel: ParallelSection, dp: int) -> str:
    """Return the layout in the form that `--layout` takes."""
    plain = ParallelSection().model_dump()
    sizes = parallel.model_dump(exclude={"timeout_minutes"})
    options = {key: value for key, value in sizes.items() if value != plain[key]}
    if dp > 1 or not options:
        options["dp"] = dp
    return ",".join(key if value is True else f"{key}={value}".replace(" ", "") for key, value in options.items())


def _check_machine(cases: Sequence[Case]) -> None:
    gpus = device.visible_gpus()
    limit = MAX_RANKS if gpus is None else len(gpus)
    for case in cases:
        if case.ranks > limit:
            why = f"this machine has {limit} GPU(s)" if gpus else f"without GPUs, {limit} are started at most"
            raise ConfigError(
                f"--layout {case.text}: needs {case.ranks} ranks, and {why}; name a smaller layout of the same kind, "
                f"or start megagrpo verify with `megagrpo launch {case.ranks} verify ...`"
            )


def _on_this_machine(case: Case) -> Outcome:
    return run_ranks(take_step, case.ranks, case.small, case.model, random_samples(), timeout=LAYOUT_SECONDS)[0]


def _in_world(cases: Sequence[Case], full: bool, tell: Callable[[str], None] | None) -> list[dict[str, Any]]:
    """Take every layout's step on every rank; rank 0 compares the results."""
    outcomes = {case.text: _timed(take_step, case.small, case.model, random_samples()) for case in cases}
    first = dist.get_rank() == 0
    dist.destroy_process_group()

    def known(case: Case) -> Timed:
        outcome, seconds = outcomes[case.text]
        assert outcome is not None, "rank 0 has every outcome"
        return outcome, seconds

    return _verdicts(cases, known, OneProcess(start="spawn"), full, tell) if first else []


def _timed[T](action: Callable[..., T], *args: Any) -> tuple[T, float]:
    started = time.monotonic()
    result = action(*args)
    return result, time.monotonic() - started


def _verdicts(
    cases: Sequence[Case],
    step: Callable[[Case], Timed],
    one_process: OneProcess,
    full: bool,
    tell: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    """Compare one case after the other; `step(case)` returns its outcome and its seconds."""
    verdicts, tell = [], tell or (lambda text: None)
    tell(header(cases[0].config, cases[0].model, random_samples()))
    for case in cases:
        try:
            expected, rounded = one_process.step(case)
            outcome, seconds = step(case)
            distances = compare(outcome, expected, rounded, coarse=_rounds(case.config))
            verdict = Verdict(case.text, case.ranks, outcome, expected, distances, seconds)
        except (RankFailed, ValueError) as error:
            verdict = Verdict(case.text, case.ranks, failure=str(error))
        verdicts.append(verdict)
        tell(as_text(verdict, full))
    tell(summary(verdicts))
    return [as_row(verdict) for verdict in verdicts]


def _rounds(config: RunConfig) -> bool:
    """Whether products have less than float32 precision."""
    return config.model.fp8_recipe != "none" or device.resolve_precision(config.model.precision) != torch.float32


class OneProcess:
    """The step computed by a single process without optimizations, cached for layouts with the same shrunken model."""

    def __init__(self, start: Literal["fork", "spawn"] | None = None):
        self._start = start
        self._known: dict[str, Outcome] = {}

    def step(self, case: Case) -> tuple[Outcome, Outcome | None]:
        """Return outcomes in float32 on the CPU, and in the run's precision on its device: None if that is the same."""
        plain = plainly(case.small)
        float32 = dict(precision="fp32", fp8_recipe="none", bf16_layers=[], fp8_param=False)
        exact = plain.model_copy(update=dict(model=plain.model.model_copy(update=float32)))
        same = not _rounds(plain) and not device.has_gpu()
        return self._run(exact, case.model, on_cpu=True), None if same else self._run(plain, case.model, on_cpu=False)

    def _run(self, config: RunConfig, model: HfConfig, on_cpu: bool) -> Outcome:
        key = f"{on_cpu} {config.model_dump_json()} {model!r}"
        if key not in self._known:
            env = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
            (self._known[key],) = run_ranks(
                take_step, 1, config, model, random_samples(), timeout=LAYOUT_SECONDS, env=env, start=self._start
            )
        return self._known[key]
