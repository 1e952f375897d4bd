"""Preflight: whether a config fits its model and its number of ranks, and what each rank holds. Needs no GPU, no weights and no torch.

Every problem is found at once, as `key: what is wrong; what to do`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from megagrpo.config import RunConfig
from megagrpo.plan.memory import engine_memory, smallest_gpu, trainer_memory
from megagrpo.plan.problems import (
    adapter_problems,
    expert_problems,
    layout_problems,
    multi_turn_problems,
    reward_problems,
    rollout_problems,
    too_big,
)
from megagrpo.plan.shapes import model_shape
from megagrpo.plan.text import experts_text, gpu_text, lora_text, memory_table, model_text, rollout_text, step_text, weights_text
from megagrpo.policy.hf_config import model_problems, parse_hf_config


@dataclass(frozen=True)
class Plan:
    """`problems` is empty when the run can start. `memory` is phase -> part -> GiB on the rank that holds most; empty without a model."""

    problems: list[str]
    rows: list[tuple[str, str]]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    smallest_gpu: float = 0.0  # GiB that a GPU needs to hold what is placed on it, a trainer rank or vLLM or both; 0 without a model

    def __str__(self) -> str:
        lines = [f"{name:<10}{text}".rstrip() for name, text in self.rows]
        if self.memory:
            lines += ["", *memory_table(self.memory)]
        if self.problems:
            lines += ["", f"{len(self.problems)} problem(s)", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def main(
    config: RunConfig,
    world_size: int | None = None,
    gpu_memory_gb: float | None = None,
    link_gb_per_s: float | None = None,
    weight_sync: bool = False,
) -> int:
    """Prints the plan; exit code 2 when something is wrong. Without `world_size`: as few ranks as the layout takes. With `weight_sync`
    also what one moves, which takes the model's own code and with it torch."""
    world_size = world_size or config.parallel.smallest_world
    made = plan(config, world_size, gpu_memory_gb)
    if weight_sync and not made.problems:
        from megagrpo.plan.weight_sync import rows_of

        try:
            made.rows.extend([("", ""), *rows_of(config, world_size, link_gb_per_s)])
        except ValueError as error:
            made.problems.append(str(error))
    print(made, file=sys.stderr if made.problems else sys.stdout)
    return 2 if made.problems else 0


def plan(config: RunConfig, world_size: int, gpu_memory_gb: float | None = None) -> Plan:
    """The plan of `config` on `world_size` ranks. With `gpu_memory_gb`, the memory of each GPU in GiB, it must also fit there."""
    parallel = config.parallel
    problems = layout_problems(config, world_size) + reward_problems(config) + multi_turn_problems(config)
    dp = max(1, world_size // parallel.model_parallel_size)
    context = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
    stages = [f"vpp {parallel.vpp}"] * (parallel.vpp > 1)
    stages += [f"layers {' '.join(map(str, parallel.pipeline_layers))}"] if parallel.pipeline_layers else []
    stages = f" ({', '.join(stages)})" if stages else ""
    rows = [
        ("layout", f"{world_size} rank(s) = tp {parallel.tp}{context} x pp {parallel.pp}{stages} x dp {dp}"),
        ("rollout", rollout_text(config)),
        ("weights", weights_text(config, True if gpu_memory_gb else None)),
        ("step", step_text(config, dp)),
    ]
    try:
        raw = model_shape(config.model.path)
    except ValueError as error:
        return Plan([*problems, *str(error).split("\n")], rows)
    unfit = model_problems(raw, parallel)
    if any(problem.startswith("model") for problem in unfit):
        return Plan(problems + unfit, rows)
    model = parse_hf_config(raw)
    rows.insert(0, ("model", model_text(config.model.path, model)))
    if model.experts:
        rows.insert(2, ("experts", experts_text(config, model, world_size)))
    if config.lora.enabled:
        rows.insert(1, ("LoRA", lora_text(config.lora, model)))
    problems += unfit + expert_problems(config, model) + adapter_problems(config, model) + rollout_problems(config, model)
    if unfit:
        return Plan(problems, rows)
    memory = trainer_memory(config, model, dp)
    smallest = smallest_gpu(config, model, memory)
    rows.append(("GPU", gpu_text(config, smallest)))
    if gpu_memory_gb is not None and smallest > gpu_memory_gb:
        problems.append(too_big(config, memory, smallest, gpu_memory_gb))
    if config.rollout.placed == "colocated":  # asleep in the other phases
        memory["generate"] = memory["generate"] | {"engine": engine_memory(config, model, gpu_memory_gb)}
    for parts in memory.values():
        parts["total"] = sum(parts.values())
    return Plan(problems, rows, memory, smallest)
