"""Finds what a user should know of a run although it can start: padding, idle ranks, few prompts, missing packages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

from megagrpo.config import DatasetSection, Problem, RunConfig
from megagrpo.config.rules.config_rules import LONGEST_SAMPLE
from megagrpo.config.sections.tracker_options import tracker_notes
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.workload import mean_group, step_samples
from megagrpo.planner.rules.checked_files import as_list, read_object


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
