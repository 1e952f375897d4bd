"""Preflight: checks a config against model and rank count and predicts memory per rank. Needs no GPU, weights or torch.

All problems are reported at once, as `key: what is wrong; what to do`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from megagrpo.config import Problem, ProblemError, RunConfig
from megagrpo.config.tracker_options import tracker_notes
from megagrpo.models.families.hf_config import MODEL, HfConfig, model_problems, parse_hf_config
from megagrpo.proof.plan import plan_problems, plan_text
from megagrpo.proof.plan.code_problems import multi_turn_problems, own_code_problems, reward_problems
from megagrpo.proof.plan.files import data_notes, data_problems, output_problems, tokenizer_notes
from megagrpo.proof.plan.gpu_specs import Gpu
from megagrpo.proof.plan.host_memory import host_memory
from megagrpo.proof.plan.plan_rules import RuleVerdict, rules_text, verdicts
from megagrpo.proof.plan.planned_memory import (
    GIB,
    engine_memory,
    on_shared_gpu,
    reload_bytes,
    smallest_gpu,
    trainer_memory,
)
from megagrpo.proof.plan.search import Candidate, search
from megagrpo.proof.plan.shapes import model_shape
from megagrpo.proof.plan.times import StepTimes, step_times
from megagrpo.proof.plan.workload import Lengths


@dataclass(frozen=True)
class Plan:
    """The result of a preflight. `problems` is empty when the run can start; `notes` do not prevent a start.

    `memory` is phase -> part -> GiB on the fullest rank; empty without a model. `model` is the model's shape. `has_gpu`
    says whether the memory of a GPU is known. `times` and `found` are set only on request.
    """

    problems: list[Problem]
    rows: list[tuple[str, str]]
    has_gpu: bool = False
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # purpose -> GiB of RAM on the fullest node
    smallest_gpu: float = 0.0  # GiB that a GPU needs for its trainer rank, its vLLM server or both; 0 without a model
    notes: list[Problem] = field(default_factory=list)
    model: HfConfig | None = None
    times: StepTimes | None = None
    found: list[Candidate] = field(default_factory=list)

    @property
    def rules(self) -> list[RuleVerdict]:
        """The verdict on each rule."""
        return verdicts(self.problems, self.notes, self.has_gpu)

    def __str__(self) -> str:
        rows = [*self.rows, ("rules", rules_text(self.rules))]
        lines = [line for name, text in rows for line in plan_text.wrapped(f"{name:<10}{text}", indent=10)]
        if self.memory:
            lines += ["", *plan_text.memory_table(self.memory)]
        if self.times:
            lines += ["", *plan_text.times_table(self.times)]
        if self.found:
            lines += ["", *plan_text.search_table(self.found)]
        for name, texts in (("note(s)", self.notes), ("problem(s)", self.problems)):
            lines += ["", f"{len(texts)} {name}"] if texts else []
            texts_lines = [line for text in texts for line in str(text).split("\n")]
            lines += [part for line in texts_lines for part in plan_text.wrapped(f"  {line}", indent=4)]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return the whole plan as JSON, sizes in GiB and times in seconds."""
        made: dict[str, Any] = {"problems": list(map(str, self.problems)), "notes": list(map(str, self.notes))}
        made |= {"rows": dict(row for row in self.rows if row[0])}
        made |= {"memory_gib": self.memory, "smallest_gpu_gib": self.smallest_gpu, "host_gib": self.host}
        made["rules"] = [
            {"number": v.rule.number, "rule": v.rule.what, "state": v.state, "told_by": v.rule.elsewhere}
            for v in self.rules
        ]
        if self.times:
            made["times"] = _times_json(self.times)
        made["found"] = [
            {"overrides": one.overrides, "gib": one.gib, "times": _times_json(one.times)} for one in self.found
        ]
        return json.dumps(made, indent=1)


def _times_json(times: StepTimes) -> dict[str, Any]:
    derived = {
        "step": times.step,
        "tokens_per_second_per_gpu": times.tokens_per_gpu,
        "mfu": times.mfu,
        "idle": times.idle,
    }
    return {"seconds": times.seconds, "gpus": times.gpus, "bubble": times.bubble} | derived


def with_times(
    made: Plan, config: RunConfig, world_size: int, gpu: Gpu, lengths: Lengths, searching: bool = False
) -> Plan:
    """Return the plan with its layout's predicted seconds, if it can run, and the fastest layouts when `searching`."""
    if made.model is None:
        return made
    memory = f"{gpu.memory_gib:g} GiB at {gpu.memory_gb_per_s:g} GB/s"
    where = f"{gpu.name}, {gpu.bf16_tflops:g} TFLOP/s in bf16, {memory} ({gpu.source})"
    average = f"{lengths.prompt:g} tokens a prompt and {lengths.response:g} a response on average"
    rows = [*made.rows, ("kind", where), ("lengths", f"{average}, {lengths.longest:g} at most")]
    unfit = [*plan_problems.gpu_problems(config, gpu)]
    times = step_times(config, made.model, world_size, gpu, lengths) if made.memory and not unfit else None
    layouts = search(config, made.model, world_size, gpu, lengths) if searching and not unfit else []
    notes = list(made.notes)
    if searching and not layouts and not unfit:
        text = (
            f"no layout of {world_size} ranks fits {gpu.name} beside vLLM as `rollout` has it; use more ranks, another "
            "rollout.tp or rollout.gpu_memory_utilization"
        )
        notes.append(Problem(("--search", "rollout.tp", "rollout.gpu_memory_utilization"), text))
    return replace(made, problems=made.problems + unfit, rows=rows, times=times, found=layouts, notes=notes)


def plan(
    config: RunConfig,
    world_size: int,
    gpu_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    has_data: bool = True,
    fetch: bool = True,
) -> Plan:
    """Return the plan of `config` on `world_size` ranks.

    With `gpu_memory_gb`, GiB per GPU, the run must fit a GPU. With `host_memory_gb` data that stays in a node's RAM
    must fit. Without `has_data` data files are not checked. Without `fetch` no model is downloaded or unpacked.
    """
    problems = [*plan_problems.layout_problems(config, world_size), *reward_problems(config)]
    problems += [*multi_turn_problems(config), *own_code_problems(config), *output_problems(config)]
    problems += data_problems(config) if has_data else []
    problems += [] if gpu_memory_gb is None else plan_problems.transport_problems(config)
    if host_memory_gb is not None and gpu_memory_gb is None:
        problems += plan_problems.cache_problems(config, host_memory_gb)
    notes = [*plan_problems.layout_notes(config, world_size), *tracker_notes(config.run.trackers)]
    notes += data_notes(config) if has_data else []
    dp = max(1, world_size // config.parallel.model_parallel_size)
    rows = [
        ("layout", plan_text.layout_text(config.parallel, world_size, dp)),
        ("machine", plan_text.machine_text(config, world_size, gpu_memory_gb)),
        ("rollout", plan_text.rollout_text(config)),
        ("weights", plan_text.weights_text(config, True if gpu_memory_gb else None)),
        ("step", plan_text.step_text(config, dp)),
    ]
    has_gpu = bool(gpu_memory_gb)
    try:
        raw = model_shape(config.model.path, fetch)
    except ProblemError as error:
        return Plan([*problems, *error.problems], rows, has_gpu, notes=notes)
    unfit = model_problems(raw, config.parallel)
    if any(problem.keys == MODEL for problem in unfit):
        return Plan(problems + unfit, rows, has_gpu, notes=notes)
    model = parse_hf_config(raw)
    tokenizer_problems, worth_knowing = tokenizer_notes(config, model)
    notes += [*plan_problems.vocabulary_notes(config, model), *worth_knowing]
    rows.insert(0, ("model", plan_text.model_text(config.model.path, model)))
    if model.experts:
        rows.insert(2, ("experts", plan_text.experts_text(config, model, world_size)))
    if config.lora.enabled:
        rows.insert(1, ("LoRA", plan_text.lora_text(config.lora, model)))
    problems += tokenizer_problems + unfit
    problems += [*plan_problems.expert_problems(config, model), *plan_problems.adapter_problems(config, model)]
    problems += [*plan_problems.fp8_problems(config, model), *plan_problems.rollout_problems(config, model)]
    made = Plan(problems, rows, has_gpu, notes=notes, model=model)
    return made if unfit else with_memory(made, config, world_size, gpu_memory_gb, host_memory_gb)


def with_memory(
    made: Plan, config: RunConfig, world_size: int, gpu_memory_gb: float | None, host_memory_gb: float | None
) -> Plan:
    """Return the plan with each phase's memory on GPU and host, and the problems of memory that is too small."""
    parallel, model, has_gpu = config.parallel, made.model, gpu_memory_gb is not None
    assert model is not None, "memory is planned for a model that could be read"
    problems, rows = list(made.problems), list(made.rows)
    memory = trainer_memory(config, model, max(1, world_size // parallel.model_parallel_size), gpu=has_gpu)
    smallest = smallest_gpu(config, model, memory)
    if gpu_memory_gb is not None and not config.rollout.urls:
        after = [name for name, _ in rows].index("rollout") + 1
        rows.insert(after, ("vLLM", plan_text.cache_text(config, model, gpu_memory_gb)))
    rows.append(("GPU", plan_text.gpu_text(config, smallest)))
    host = {}
    # otherwise the layout does not exist
    if world_size % parallel.model_parallel_size == world_size % parallel.expert_parallel_size == 0:
        host = host_memory(config, model, world_size, gpu=has_gpu)
        rows.append(("host", plan_text.host_text(host)))
        problems += [] if host_memory_gb is None else plan_problems.too_little_ram(host, host_memory_gb)
    if gpu_memory_gb is not None and smallest > gpu_memory_gb:
        problems.append(plan_problems.too_big(config, model, memory, smallest, gpu_memory_gb))
    engine = engine_memory(config, model, gpu_memory_gb)
    if config.rollout.placed == "colocated" and not has_gpu:  # on CPUs vLLM does not sleep, and offloading frees no RAM
        memory["generate"] = memory["generate"] | engine
    elif config.rollout.placed == "colocated":
        memory = on_shared_gpu(config, memory, engine, reload_bytes(config, model) / GIB)
    for parts in memory.values():
        parts["total"] = sum(parts.values())
    return replace(made, problems=problems, rows=rows, memory=memory, host=host, smallest_gpu=smallest)
