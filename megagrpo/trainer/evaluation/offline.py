"""Evaluates the held-out sets of a config with vLLM alone: `megagrpo eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.packing.sample_table import Vote, votes_of
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.prompts import prompt_reader
from megagrpo.data.tokens.row_settings import RowReader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.engine.http.protocol import Generator
from megagrpo.engine.servers.serving import Serving
from megagrpo.environments.dialogues import Dialogues, make_dialogues
from megagrpo.environments.own_judges import own_judges
from megagrpo.environments.task_engine import generator_of
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.process.atomic_file import write_atomically
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.terminal import side_by_side, warn
from megagrpo.records.progress_bars import run_progress
from megagrpo.records.rows.completions import response_row
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.evaluation.sets import HeldOut, check_columns, decodable_sets, evaluate, load_sets
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.trainer.rollout.scored_groups import OnDemand, scored_rollouts
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.bridge.image_facts import processor_of

TABLE_METRICS = ("reward", "completions/mean_length", "completions/clipped_ratio")


def evaluate_offline(
    config: RunConfig, base_folder: Path, checkpoint: str | None, adapter: str | None, resources: ExitStack
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Return the metrics as in a run, without `eval/`, and the responses of each set by its name ("" for data.eval)."""
    serving = resources.enter_context(Serving(config, warn))
    try:
        folder = serving.find(checkpoint, adapter)
        tokenizer = processor_of(config, folder)
        RowReader(config, tokenizer, load_hf_config(folder).vocab_size).check_run()
        of_rewards = config.all_rewards, config.rollout.max_completion_length, base_folder, config.task_rewards
        rewards = resources.enter_context(RewardScorer(*of_rewards))
        dialogues, of_tasks = dict[str, Dialogues | None](), dict[str, list[HeldOut]]()
        for task in config.each_task:
            own, limit = task.config, config.rollout.max_prompt_length
            of_dialogues = own.multi_turn, own.data, own.rewards.names, limit
            each = dialogues[task.name] = make_dialogues(*of_dialogues, tokenizer, base_folder, resources)
            tools, names = (each.tools, each.reward_names) if each else ([], [])
            read = prompt_reader(own, tokenizer, tools, needs={} if names else rewards.needs(task.name))
            of_tasks[task.name] = load_sets(task, sampling_of(config.rollout, tokenizer), read, names)
        sets = [held_out for of_task in of_tasks.values() for held_out in of_task]
        if not sets:
            raise ValueError(
                "evaluation.sets: there is nothing to evaluate; name sets, or held-out prompts in data.eval"
            )
        for warning in (warning for held_out in sets for warning in held_out.warnings):
            warn(f"warning: {warning}")
        sets = decodable_sets(sets, None, warn)
        for name, of_task in of_tasks.items():
            check_columns(of_task, rewards, dialogues[name], name)
        serving.start()
    except (ValueError, NoRollouts) as error:
        raise ConfigError(str(error)) from error
    client = serving.engine(tokenizer)
    ends = sampling_of(config.rollout, tokenizer).stop_token_ids
    of_texts = tokenizer, config.data.chat_template, ends, config.longest_sequence
    resources.enter_context(own_judges(client, rewards, config.all_rewards.own_judges, *of_texts))
    engine: Generator = generator_of(client, dialogues)
    phases = Phases(run_progress(config.run))

    def collect(
        prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, vote: Vote | None
    ) -> tuple[StepSamples, dict[str, float]]:
        scored, counters = scored_rollouts(OnDemand(engine, rewards), prompts, n, sampling, seed, phases)
        return StepSamples.of(scored, votes=votes_of(scored, n, vote)), counters

    responses: dict[str, list[dict[str, Any]]] = {}

    def see(held_out: HeldOut, samples: StepSamples) -> None:
        scored = list(samples.own.values())
        rewards_or_none = [None if math.isnan(s.reward) else s.reward for s in scored]
        pairs = zip(scored, rewards_or_none, strict=True)
        responses[held_out.name] = [response_row(s) | {"reward": reward} for s, reward in pairs]

    return evaluate(sets, collect, config.run.seed, see), responses


def table(metrics: dict[str, float], names: Sequence[str]) -> str:
    """Return one line per set: reward, length, share of truncated responses, every pass@k and maj@k."""
    by_set = {
        name: {key.removeprefix(f"{name}/" if name else ""): value for key, value in metrics.items()} for name in names
    }
    estimates = sorted(
        {key for of_set in by_set.values() for key in of_set if key.startswith(("pass@", "maj@")) and "/" not in key},
        key=_order,
    )
    width = max(len("set"), *(len(name or "data.eval") for name in names))
    heads = ["reward", "length", "cut", *estimates]
    columns = [
        [f"  {head:>8}", *(f"  {of_set[key]:8.3f}" if key in of_set else f"  {'-':>8}" for of_set in by_set.values())]
        for head, key in zip(heads, (*TABLE_METRICS, *estimates), strict=True)
    ]
    return "\n".join(
        side_by_side([f"{name:{width}}" for name in ("set", *(name or "data.eval" for name in by_set))], columns)
    )


def _order(estimate: str) -> tuple[bool, int]:
    name, _, k = estimate.partition("@")
    return name == "maj", int(k)


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write one JSON file that is complete or absent. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(contents, indent=1, ensure_ascii=False))
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
