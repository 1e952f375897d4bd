"""Metrics of the samples of a step, from the facts that every rank has."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from megagrpo.algorithms.advantages import reward_statistics
from megagrpo.data.packing.sample_table import (
    DIALOGUE,
    FAILED_DIALOGUE,
    FORCED,
    KNOWS_STOP,
    LIMITS_THOUGHTS,
    STOPPED,
    TRUNCATED,
)
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.types import CAUSES, ENDINGS


def rollout_metrics(samples: StepSamples) -> dict[str, float]:
    """Return lengths and finish reasons of the responses, mean and std of each reward function over the rollouts it
    could score, and the numbers that functions logged, averaged over the rollouts of their calls."""
    lengths = samples.written.tolist()
    ended = samples.written[~samples.has(TRUNCATED)].tolist()
    metrics = {
        "num_tokens": float(samples.every.facts["length"].sum(dtype=np.int64)),
        "num_generated_tokens": float(sum(lengths)),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = statistics.fmean(ended)
    if (knows_stop := samples.has(KNOWS_STOP)).any():
        metrics["completions/stop_string_ratio"] = statistics.fmean(samples.has(STOPPED)[knows_stop].tolist())
    if (limited := samples.has(LIMITS_THOUGHTS)).any():
        forced = samples.has(FORCED)[limited]
        metrics["completions/forced_end_of_thinking_ratio"] = statistics.fmean(forced.tolist())
    for name, column in zip(samples.columns.rewards, samples.facts["rewards"].T, strict=True):
        if values := column[~np.isnan(column)].tolist():
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
            metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return metrics | _logged_metrics(samples) | _dialogue_metrics(samples)


def task_metrics(samples: StepSamples, num_generations: int, tasks: Sequence[str]) -> dict[str, float]:
    """Return groups, rewards, mean length and share of truncated responses of each of the `tasks`, by name."""
    if not tasks:
        return {}
    of_tasks = samples.groups_of_tasks(num_generations)
    rewards, metrics = samples.rewards(num_generations), dict[str, float]()
    groups = samples.groups(num_generations)
    for name in tasks:
        own = of_tasks.get(name, torch.empty(0))
        found = {"groups": float(len(own))}
        if len(own):
            found |= reward_statistics(rewards[own])
            mine = np.isin(groups, own.numpy())
            found["completions/mean_length"] = float(samples.written[mine].mean())
            found["completions/clipped_ratio"] = float(samples.has(TRUNCATED)[mine].mean())
        metrics |= {f"tasks/{name}/{key}": value for key, value in found.items()}
    return metrics


def _logged_metrics(samples: StepSamples) -> dict[str, float]:
    """Return the means of the numbers that functions logged, in the order in which samples have them."""
    known = ~np.isnan(samples.facts["logged"])
    firsts = {i: int(column.argmax()) for i, column in enumerate(known.T) if column.any()}
    names = samples.columns.logged
    return {
        f"rewards/{names[i]}": statistics.fmean(samples.facts["logged"][known[:, i], i].tolist())
        for i in sorted(firsts, key=firsts.__getitem__)
    }


def _dialogue_metrics(samples: StepSamples) -> dict[str, float]:
    """Return turns and tool calls per response, the failed share of tool calls (as in TRL), failed dialogues by cause,
    and how dialogues ended."""
    if not (of_dialogues := samples.has(DIALOGUE)).any():
        return {}
    facts = samples.facts[of_dialogues]
    names = "turns", "tool_calls", "tool_failures", "tool_shortened"
    turns, called, failed, shortened = (samples.totals(samples.every.facts[name])[of_dialogues] for name in names)
    calls, failures = int(called.sum()), int(failed.sum())
    ended, causes = np.bincount(facts["ended"], minlength=len(ENDINGS)).tolist(), np.bincount(facts["cause"])
    shares = {f"multi_turn/ended/{name}": count / len(facts) for name, count in zip(ENDINGS, ended, strict=True)}
    by_cause = {f"multi_turn/failures/{CAUSES[i]}": float(count) for i, count in enumerate(causes) if i and count}
    return {
        "multi_turn/mean_turns": statistics.fmean(turns.tolist()),
        "multi_turn/failures": float(samples.has(FAILED_DIALOGUE).sum()),
        "tools/call_frequency": calls / len(turns),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        "tools/shortened_frequency": int(shortened.sum()) / calls if calls else 0.0,
        "multi_turn/retries": float(facts["retries"].sum()),
        **by_cause,
        **shares,
        **_turn_metrics(samples),
    }


def _turn_metrics(samples: StepSamples) -> dict[str, float]:
    """Return tokens and seconds per turn, and what conversations spend their time on: shares that add up to 1."""
    facts = samples.every.facts
    turns, seconds = int(facts["turns"].sum()), facts["seconds"].astype(np.float64)
    if not turns:
        return {}
    by_cause, longest = seconds[:, :3].sum(0), seconds[:, 3:].max(0)
    queued, generated, answered = by_cause.tolist()
    total = queued + generated + answered
    names = "idle/slots", "idle/generation", "idle/tools"
    return {
        "multi_turn/turn_tokens": int(samples.written[samples.has(DIALOGUE)].sum()) / turns,
        "multi_turn/turn_seconds/mean": (queued + generated) / turns,
        "multi_turn/turn_seconds/max": float(longest[0]),
        "multi_turn/tool_seconds/mean": answered / turns,
        "multi_turn/tool_seconds/max": float(longest[1]),
        **(dict(zip(names, (by_cause / total).tolist(), strict=True)) if total else {}),
    }


def staleness(samples: StepSamples, weight_version: int) -> dict[str, float]:
    """Return the mean and maximum number of weight versions between a token's sampling and the policy trained on it."""
    samples = samples.every
    ages, tokens = weight_version - samples.facts["version"].astype(np.int64), samples.responses
    total = int((ages * tokens).sum())
    if samples.columns.later_versions:
        total -= int(samples.facts["later"].sum(dtype=np.int64))
    return {"staleness/mean": total / int(tokens.sum()), "staleness/max": float(ages[tokens > 0].max())}


def pass_rates(samples: StepSamples, pass_reward: float) -> dict[int, float]:
    """Return prompt_id -> share of its responses with a reward of at least `pass_reward`. Repeated draws are pooled."""
    passed: dict[int, list[bool]] = defaultdict(list)
    for prompt, has_passed in zip(samples.prompts, (samples.facts["reward"] >= pass_reward).tolist(), strict=True):
        passed[prompt.prompt_id].append(has_passed)
    return {prompt_id: statistics.fmean(of_prompt) for prompt_id, of_prompt in passed.items()}
