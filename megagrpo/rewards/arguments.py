"""What a reward function is told of each rollout, by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megagrpo.rewards.workers.channel import Copies
from megagrpo.row_image import has_images
from megagrpo.suggestions import did_you_mean
from megagrpo.types import Rollout


def _policy_ids(rollout: Rollout, span: slice = slice(None)) -> list[int]:
    ids: list[int] = rollout.response_ids[span][rollout.written[span]].tolist()
    return ids


def _completion(rollout: Rollout) -> str | list[dict[str, Any]]:
    messages = None if rollout.dialogue is None else list(rollout.dialogue.messages)
    if not isinstance(rollout.prompt.messages, str):
        return messages or [{"role": "assistant", "content": rollout.text}]
    written = [m["content"] for m in messages or () if m["role"] == "assistant"]
    return rollout.text if messages is None else written[-1]


def _trajectory(rollout: Rollout) -> dict[str, Any]:
    """Return a trajectory as a reward function sees it: its samples, in the order of turns and tokens, and its end."""
    dialogue = rollout.dialogue
    about: dict[str, Any] = dict(ended="done" if rollout.finish_reason == "stop" else "length", cause="", retries=0)
    if dialogue is not None:
        about = dict(ended=dialogue.ended, cause=dialogue.cause, retries=dialogue.retries)
        about |= {"outputs": dialogue.outputs} if dialogue.outputs else {}
    return {"samples": [_sample(sample) for sample in rollout.samples], **about}


def _sample(sample: Rollout) -> dict[str, Any]:
    turns = [
        {"token_ids": _policy_ids(sample, slice(turn.start, turn.stop)), "calls": list(turn.calls)}
        | {name: getattr(turn, name) for name in ("failures", "shortened", "finish_reason", "reward")}
        for turn in sample.turns
    ]
    messages, role = [{"role": "assistant", "content": sample.text}], ""
    if sample.dialogue is not None:
        messages, role = list(sample.dialogue.messages), sample.dialogue.role
    return {"context": sample.prompt.messages, "messages": messages, "turns": turns} | ({"role": role} if role else {})


PER_ROLLOUT: dict[str, Callable[[Rollout], Any]] = {
    "prompts": lambda rollout: rollout.prompt.messages,
    "completions": _completion,
    "completion_ids": _policy_ids,
    "finish_reason": lambda rollout: rollout.finish_reason,
    "prefixes": lambda rollout: rollout.prompt.opened,
    "is_truncated": lambda rollout: rollout.finish_reason == "length",
    "trajectories": _trajectory,
}


def column_of(rollouts: Sequence[Rollout], name: str) -> list[Any] | Copies:
    """Return a column's values for these rollouts. Images that all of them share, as a group does, are sent once."""
    values = [rollout.prompt.columns.get(name) for rollout in rollouts]
    first = values[0]
    is_shared = has_images(first) and all(value is first for value in values)
    return Copies(first, len(values)) if is_shared else values


def check_needs(needs: Mapping[str, Iterable[tuple[str, ...]]], columns: list[str]) -> None:
    """Raise ValueError when a data set with `columns` lacks what user code needs: for each piece of code, tuples of
    names of which one must be a column."""
    has = ", ".join(columns) or "no column besides the prompt"
    fix = "rename with data.columns" if columns else "add the column to each row"
    problems = [
        f"{what} needs column {' or '.join(f'`{name}`' for name in alternatives)}; the data set has "
        f"{has}{did_you_mean(alternatives[0], columns)}; {fix}"
        for what, of_one in needs.items()
        for alternatives in of_one
        if set(alternatives).isdisjoint(columns)
    ]
    if problems:
        raise ValueError("\n".join(problems))
