"""What a step computed when every rank held all scored rollouts: the oracle of the facts that replaced them."""

import statistics
from collections import defaultdict

from megagrpo.types import Rollout, ScoredRollout, Turn


def samples_of(scored: ScoredRollout) -> list[Rollout]:
    return [scored.rollout, *scored.rollout.branches]


def rollout_metrics(scored: list[ScoredRollout]) -> dict[str, float]:
    lengths = [sum(r.length for r in samples_of(s)) for s in scored]
    ended = [length for s, length in zip(scored, lengths, strict=True) if s.rollout.finish_reason != "length"]
    metrics = {
        "num_tokens": float(sum(len(r.prompt.token_ids) + len(r.response_ids) for s in scored for r in samples_of(s))),
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
    every = [r.dialogue for s in scored for r in samples_of(s) if r.dialogue is not None]
    counted = "tool_calls", "tool_failures", "tool_shortened"
    calls, failures, shortened = (sum(getattr(d, name) for d in every) for name in counted)
    return metrics | {
        "multi_turn/mean_turns": sum(len(d.turns) for d in every) / len(dialogues),
        "multi_turn/failures": float(sum(d.ended == "failed" for d in dialogues)),
        "tools/call_frequency": calls / len(dialogues),
        "tools/failure_frequency": failures / calls if calls else 0.0,
        "tools/shortened_frequency": shortened / calls if calls else 0.0,
        "multi_turn/retries": float(sum(d.retries for d in dialogues)),
        **{
            f"multi_turn/failures/{cause}": float(sum(d.cause == cause for d in dialogues))
            for cause in ("timeout", "died", "raised", "protocol", "prompt_length", "messages")
            if any(d.cause == cause for d in dialogues)
        },
        **{
            f"multi_turn/ended/{ended}": sum(d.ended == ended for d in dialogues) / len(dialogues)
            for ended in ("done", "length", "budget", "max_turns", "tool_limit", "time_limit", "failed")
        },
        **turn_metrics(scored, [turn for d in every for turn in d.turns]),
    }


def turn_metrics(scored: list[ScoredRollout], turns: list[Turn]) -> dict[str, float]:
    generated, answered = [turn.generated for turn in turns], [turn.answered for turn in turns]
    queued, total = sum(turn.queued for turn in turns), sum(generated) + sum(answered)
    metrics = {
        "multi_turn/turn_tokens": sum(r.length for s in scored if s.rollout.dialogue for r in samples_of(s))
        / len(turns),
        "multi_turn/turn_seconds/mean": statistics.fmean(generated),
        "multi_turn/turn_seconds/max": max(generated),
        "multi_turn/tool_seconds/mean": statistics.fmean(answered),
        "multi_turn/tool_seconds/max": max(answered),
    }
    if total:
        metrics["idle/slots"] = queued / total
        metrics["idle/generation"] = (sum(generated) - queued) / total
        metrics["idle/tools"] = sum(answered) / total
    return metrics


def staleness(scored: list[ScoredRollout], weight_version: int) -> dict[str, float]:
    ages = [weight_version - version for s in scored for r in samples_of(s) for version in r.token_versions.tolist()]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))}


def pass_rates(scored: list[ScoredRollout], pass_reward: float) -> dict[int, float]:
    passed = defaultdict(list)
    for rollout in scored:
        passed[rollout.rollout.prompt.prompt_id].append(rollout.reward >= pass_reward)
    return {prompt_id: statistics.fmean(of_prompt) for prompt_id, of_prompt in passed.items()}
