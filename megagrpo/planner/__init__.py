"""Preflight: checks a config against model and rank count and predicts memory per rank. Needs no GPU, weights or torch.

All problems are reported at once, as `key: what is wrong; what to do`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from megagrpo.config import Problem, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner import plan_text
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.hidden_messages import overlap_row
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.rules.plan_notes import idle_gpus, run_notes
from megagrpo.planner.rules.plan_problems import check, gpu_problems
from megagrpo.planner.times.step_times import StepTimes, step_times
from megagrpo.platform.process.terminal import wrapped


@dataclass(frozen=True)
class Plan:
    """The result of a preflight. `problems` is empty when the run can start; `notes` do not prevent a start.

    `memory` is phase -> part -> GiB on the fullest rank; empty without a model. `model` is the model's shape. `times`
    are set only with a kind of GPU.
    """

    problems: list[Problem]
    rows: list[tuple[str, str]]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # purpose -> GiB of RAM on the fullest node
    smallest_gpu: float = 0.0  # GiB that a GPU needs for its trainer rank, its vLLM server or both; 0 without a model
    notes: list[Problem] = field(default_factory=list)
    model: HfConfig | None = None
    times: StepTimes | None = None

    def __str__(self) -> str:
        lines = [line for name, text in self.rows for line in wrapped(f"{name:<10}{text}", indent=10)]
        if self.memory:
            lines += ["", *plan_text.memory_table(self.memory)]
        if self.times:
            lines += ["", *plan_text.times_table(self.times)]
        for name, texts in (("note(s)", self.notes), ("problem(s)", self.problems)):
            lines += ["", f"{len(texts)} {name}"] if texts else []
            texts_lines = [line for text in texts for line in str(text).split("\n")]
            lines += [part for line in texts_lines for part in wrapped(f"  {line}")]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return the whole plan as JSON, sizes in GiB and times in seconds."""
        made: dict[str, Any] = {"problems": list(map(str, self.problems)), "notes": list(map(str, self.notes))}
        made |= {"rows": dict(row for row in self.rows if row[0])}
        made |= {"memory_gib": self.memory, "smallest_gpu_gib": self.smallest_gpu, "host_gib": self.host}
        if self.times:
            names = ("seconds", "gpus", "bubble", "step", "bound", "control", "sync", "overlap", "mfu", "idle")
            times = {name: getattr(self.times, name) for name in names}
            times["tokens_per_second_per_gpu"] = self.times.tokens_per_gpu
            made |= {"times": times}
        return json.dumps(made, indent=1)


def with_times(made: Plan, config: RunConfig, world_size: int, gpu: Gpu, lengths: Lengths) -> Plan:
    """Return the plan with its layout's predicted seconds, if it can run."""
    if made.model is None:
        return made
    memory = f"{gpu.memory_gib:g} GiB at {gpu.memory_gb_per_s:g} GB/s"
    where = f"{gpu.name}, {gpu.bf16_tflops:g} TFLOP/s in bf16, {memory} ({gpu.source})"
    average = f"{lengths.prompt:g} tokens a prompt and {lengths.response:g} a response on average"
    rows = [*made.rows, ("kind", where), ("lengths", f"{average}, {lengths.longest:g} at most")]
    unfit = list(gpu_problems(config, gpu))
    times = step_times(config, made.model, world_size, gpu, lengths) if made.memory and not unfit else None
    if times:
        rows = [row for row in rows if row[0] != "overlap"] + overlap_row(config, made.model, times.overlap)
    return replace(made, problems=made.problems + unfit, rows=rows, times=times)


def plan(
    config: RunConfig,
    world_size: int,
    gpu_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    has_data: bool = True,
    fetch: bool = True,
) -> Plan:
    """Return the plan of `config`: what `check` finds, which takes the same arguments, with notes and text."""
    found = check(config, world_size, gpu_memory_gb, host_memory_gb, has_data, fetch)
    rows = plan_text.rows_of(config, world_size, gpu_memory_gb, found.model, found.memory)
    generates = config.generates
    notes = run_notes(config, world_size, found.model, has_data)
    notes += idle_gpus(config, world_size) if gpu_memory_gb else []
    made = Plan(found.problems, rows, notes=notes, model=found.model)
    if (memory := found.memory) is None:
        return made
    phases = {name: parts for name, parts in memory.phases.items() if generates or name not in ("generate", "sync")}
    return replace(made, memory=phases, host=memory.host, smallest_gpu=memory.smallest_gpu)
