"""Preflight: checks a config against model and rank count and predicts memory per rank. Needs no GPU, weights or torch.

All problems are reported at once, as `key: what is wrong; what to do`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from megagrpo.config import DatasetSection, Problem, RunConfig
from megagrpo.config.rules.config_rules import LONGEST_SAMPLE
from megagrpo.config.sections.tracker_options import tracker_notes
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner import plan_text
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.hidden_messages import overlap_row
from megagrpo.planner.costs.workload import Lengths, mean_group, step_samples
from megagrpo.planner.rules.checked_files import as_list, read_object
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


def run_notes(config: RunConfig, world_size: int, model: HfConfig | None, has_data: bool) -> list[Problem]:
    """Return all notes on a run. Without `has_data` data files are not read."""
    notes = [*layout_notes(config, world_size), *tracker_notes(config.run.trackers)]
    if has_data and not config.tasks:
        notes += _data_notes(config.data.train, config.rollout.prompts_per_step)
    if model is not None:
        folder = Path(os.path.expanduser(config.model.tokenizer or config.model.path))
        if model.vocab_size % (tp := config.parallel.tp):
            said = f"the vocabulary of {model.vocab_size} is padded to {model.padded_vocab(tp)} for tp={tp}; exports"
            notes.append(Problem(("parallel.tp",), f"{said} and weight syncs remove the padding"))
        notes += _tokenizer_notes(folder, config.data.chat_template is not None, model.raw.get("eos_token_id"))
    return notes


def layout_notes(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield notes on settings that stop nothing: padding, ranks without samples, and a reference that never moves."""
    p, a = config.parallel, config.algorithm
    if a.sync_ref_model and config.run.max_steps is not None and a.ref_model_sync_steps > config.run.max_steps:
        said = f"{a.ref_model_sync_steps} is after the last step, run.max_steps {config.run.max_steps}, so the"
        yield Problem(("algorithm.ref_model_sync_steps", "run.max_steps"), f"{said} reference never moves")
    if config.max_model_len % p.sequence_align:
        said = f"every sample is padded to a multiple of 2 x cp = {p.sequence_align} tokens; the longest has"
        yield Problem(("parallel.cp", *LONGEST_SAMPLE), f"{said} {config.max_model_len}")
    dp, slices = world_size // p.model_parallel_size, config.algorithm.steps_per_generation
    samples = step_samples(config) // slices
    if samples < dp:
        said = (
            f"an optimizer step has {samples} samples (responses, not prompts), fewer samples than data-parallel "
            f"ranks, {dp}; use {ceil(dp * slices / mean_group(config.each_task))} prompts or more"
        )
        yield Problem(("rollout.prompts_per_step", "rollout.num_generations"), said)


def idle_gpus(config: RunConfig, world_size: int) -> list[Problem]:
    """Return a note when colocated servers leave some of the ranks' GPUs idle while they generate."""
    r = config.rollout
    idle, more = world_size - r.server_gpus, world_size // r.devices_per_server
    if r.placed != "colocated" or idle <= 0 or more == r.servers:
        return []
    said = f"{idle} of {world_size} GPUs are idle during generation; rollout.servers={more} uses"
    return [Problem(("rollout.servers", "rollout.tp"), f"{said} {more * r.devices_per_server}")]


def _data_notes(data: DatasetSection, drawn: int) -> Iterator[Problem]:
    """Yield a note when there are fewer prompts than the `drawn` ones of a step, so that a step repeats some."""
    path, rows = Path(data.source), data.size
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
        rows = count if rows is None else min(rows, count)
    if rows is not None and rows < drawn:
        said = f"{rows} prompts, but a step draws {drawn} (rollout.prompts_per_step) and repeats some; lower"
        yield Problem(("data.train", "rollout.prompts_per_step"), f"{said} prompts_per_step or add prompts")


def _tokenizer_notes(folder: Path, has_template: bool, eos: int | list[int] | None) -> Iterator[Problem]:
    """Yield notes on a tokenizer in a local folder: no chat template, and end tokens that differ from `eos`, those of
    config.json. `has_template`: the config sets `data.chat_template`."""
    settings = read_object(folder / "tokenizer_config.json")
    if not settings:
        return
    if not has_template and "chat_template" not in settings and not (folder / "chat_template.jinja").exists():
        said = f"the tokenizer in {folder} has no chat template, as is usual for base models; set one, or `none` for"
        yield Problem(("data.chat_template", "model.tokenizer"), f"{said} plain text")
    ends = read_object(folder / "generation_config.json").get("eos_token_id")
    if ends is not None and eos is not None and set(as_list(ends)) != set(as_list(eos)):
        said = f"generation_config.json ends responses at {as_list(ends)}, config.json at {as_list(eos)}; check that"
        yield Problem(("model.tokenizer", "model.path"), f"{said} both are intended")
