"""Compares what `megagrpo plan` predicts for a run's config with the memory and the seconds that the run measured."""

from __future__ import annotations

import statistics
from typing import Any

from pydantic import ValidationError

from megagrpo.config import ConfigError, ProblemError, RunConfig
from megagrpo.planner import plan, with_times
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.reduce import number

PHASES = ("generate", "logprobs", "train", "sync")


def plan_against_measured(run: RunFiles) -> dict[str, Any]:
    """Return predicted memory by phase in GiB, predicted and measured seconds by phase, and notes on missing parts."""
    memory_notes: list[str] = []
    times_notes: list[str] = []
    made: dict[str, Any] = {"memory": {}, "peak": None, "predicted": {}, "mfu": None}
    made |= {"memory_notes": memory_notes, "times_notes": times_notes}
    made["measured"] = {phase: _mean(run, f"time/{phase}") for phase in (*PHASES, "step")}
    made["measured_peak"] = max(
        (v for row in run.steps if (v := number(row.get("memory_gb"))) is not None), default=None
    )
    made["measured_mfu"] = _mean(run, "mfu")
    try:
        config = RunConfig.model_validate(run.config)
        ranks = run.last_start.get("ranks") or config.parallel.smallest_world
        device = str(run.last_start.get("device") or "").lower()
        gpu = next((gpu for key, gpu in GPUS.items() if key in device), None)  # None for a CPU or another kind
        memory = number(run.last_start.get("gpu_memory_gb"))
        planned = plan(config, int(ranks), memory, has_data=False)
        if gpu is not None:
            lengths = expected_lengths(config, _mean_prompt(run), _mean(run, "completions/mean_length"))
            planned = with_times(planned, config, int(ranks), gpu, lengths)
    except ValidationError as error:
        count = error.error_count()
        memory_notes.append(
            f"The plan is not available: resolved.yaml does not fit this version of megagrpo ({count} problem(s))."
        )
        return made
    except (ConfigError, ProblemError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        memory_notes.append(printable(f"The plan is not available: {first}"))
        return made
    made["memory"] = {
        phase: {part: number(size) for part, size in parts.items()} for phase, parts in planned.memory.items()
    }
    made["peak"] = max((parts["total"] for parts in made["memory"].values()), default=None)
    if not planned.memory:
        memory_notes.append(printable("The plan predicts no memory: " + "; ".join(map(str, planned.problems[:1]))))
    elif memory is None:
        memory_notes.append(
            "Measured memory is the resident memory of the whole process on a CPU: Python, its libraries and freed "
            "memory included. The plan counts tensors only."
        )
    if any("vllm_weights" in parts for parts in planned.memory.values()):
        memory_notes.append(
            "vLLM runs in processes of its own: its weights and cache are not part of the measured peak."
        )
    if planned.times is not None:
        made["predicted"] = {phase: number(planned.times.seconds[phase]) for phase in PHASES} | {
            "step": number(planned.times.step)
        }
        made["mfu"] = number(planned.times.mfu)
    elif gpu is None:
        known = ", ".join(GPUS)
        times_notes.append(
            f"The plan predicts seconds for these GPUs: {known}. This run's device is another one, or is not recorded."
        )
    return made


def _mean(run: RunFiles, name: str) -> float | None:
    """Return the mean of a metric without the first step, which also warms up, if there are more."""
    values = [value for row in run.steps if (value := number(row.get(name))) is not None]
    return number(statistics.fmean(values[1:] or values)) if values else None


def _mean_prompt(run: RunFiles) -> float | None:
    tokens, response = _mean(run, "num_tokens"), _mean(run, "completions/mean_length")
    size, groups = run.setting("rollout.num_generations"), run.setting("rollout.prompts_per_step")
    if tokens is None or response is None or not isinstance(size, int) or not isinstance(groups, int):
        return None
    return max(1.0, tokens / (size * groups) - response)
