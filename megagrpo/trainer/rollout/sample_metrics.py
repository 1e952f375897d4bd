"""Metrics of the samples of a step, from the facts that every rank has."""

from __future__ import annotations

import statistics
from collections import defaultdict

import numpy as np

from megagrpo.data.step_samples import DIALOGUE, FAILED_DIALOGUE, KNOWS_STOP, STOPPED, TRUNCATED, StepSamples


def rollout_metrics(samples: StepSamples) -> dict[str, float]:
    """Return lengths and finish reasons of the responses, mean and std of each reward function over the rollouts it
    could score, and the numbers that functions logged, averaged over the rollouts of their calls."""
    lengths = samples.written.tolist()
    ended = samples.written[~samples.has(TRUNCATED)].tolist()
    metrics = {
        "num_tokens": float(samples.facts["length"].sum(dtype=np.int64)),
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
    for name, column in zip(samples.columns.rewards, samples.facts["rewards"].T, strict=True):
        if values := column[~np.isnan(column)].tolist():
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
            metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return metrics | _logged_metrics(samples) | _dialogue_metrics(samples)


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
    """Return turns and tool calls per response, the failed share of tool calls (as in TRL), and failed dialogues."""
    if not (of_dialogues := samples.has(DIALOGUE)).any():
        return {}
    facts = samples.facts[of_dialogues]
    calls, failures = int(facts["tool_calls"].sum()), int(facts["tool_failures"].sum())
    return {
        "multi_turn/mean_turns": statistics.fmean(facts["turns"].tolist()),
        "multi_turn/failures": float(samples.has(FAILED_DIALOGUE).sum()),
        "tools/call_frequency": calls / len(facts),
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }


def staleness(samples: StepSamples, weight_version: int) -> dict[str, float]:
    """Return the mean and maximum number of weight versions between a token's sampling and the policy trained on it."""
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
