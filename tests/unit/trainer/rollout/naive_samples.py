"""What a step computed when every rank held all scored rollouts: the oracle of the facts that replaced them."""

import statistics
from collections import defaultdict

from megagrpo.types import ScoredRollout


def rollout_metrics(scored: list[ScoredRollout]) -> dict[str, float]:
    lengths = [s.rollout.length for s in scored]
    ended = [length for s, length in zip(scored, lengths, strict=True) if s.rollout.finish_reason != "length"]
    metrics = {
        "num_tokens": float(sum(len(s.rollout.prompt.token_ids) + len(s.rollout.response_ids) for s in scored)),
        "num_generated_tokens": float(sum(lengths)),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = statistics.fmean(ended)
    if stops := [bool(s.rollout.stop_string) for s in scored if s.rollout.stop_string is not None]:
        metrics["completions/stop_string_ratio"] = statistics.fmean(stops)
    for name in scored[0].rewards:
        values = [reward for s in scored if (reward := s.rewards[name]) is not None]
        if values:
            metrics[f"rewards/{name}/mean"] = statistics.fmean(values)
            metrics[f"rewards/{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
    for name in dict.fromkeys(name for s in scored for name in s.logged):
        metrics[f"rewards/{name}"] = statistics.fmean(s.logged[name] for s in scored if name in s.logged)
    dialogues = [s.rollout.dialogue for s in scored if s.rollout.dialogue is not None]
    if not dialogues:
        return metrics
    calls, failures = (sum(getattr(d, name) for d in dialogues) for name in ("tool_calls", "tool_failures"))
    return metrics | {
        "multi_turn/mean_turns": statistics.fmean(d.num_turns for d in dialogues),
        "multi_turn/failures": float(sum(d.ended == "failed" for d in dialogues)),
        "tools/call_frequency": calls / len(dialogues),
        "tools/failure_frequency": failures / calls if calls else 0.0,
    }


def staleness(scored: list[ScoredRollout], weight_version: int) -> dict[str, float]:
    ages = [weight_version - version for s in scored for version in s.rollout.token_versions.tolist()]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))}


def pass_rates(scored: list[ScoredRollout], pass_reward: float) -> dict[int, float]:
    passed = defaultdict(list)
    for rollout in scored:
        passed[rollout.rollout.prompt.prompt_id].append(rollout.reward >= pass_reward)
    return {prompt_id: statistics.fmean(of_prompt) for prompt_id, of_prompt in passed.items()}
