"""The responses of a step as rows (lines of `completions.jsonl`), and as a table of texts and numbers for trackers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import batched, islice, takewhile
from typing import Any, Protocol

import numpy as np

from megagrpo.platform.parallel.bulk_messages import parts_to_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.records.rows.jsonl_file import encoded
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.row_image import content_text
from megagrpo.types import Rollout, ScoredRollout

Row = dict[str, Any]
PART_ROWS = 64  # lines that a leader sends to rank 0 in one part


class Rows(Sized, Iterable[Row], Protocol):
    """The rows of a step. They may be read from a file, one by one, each time they are iterated."""


def completion_lines(layout: Layout, trained: TrainedRollouts) -> Iterator[bytes]:
    """Yield on rank 0 the lines of `completions.jsonl` of a step, in parts, from the leaders that sampled the
    responses. Collective; see `parts_to_first_rank`."""
    sampled_by = trained.samples.sampled_by
    starts = np.append(0, np.flatnonzero(np.diff(sampled_by)) + 1).tolist()  # of neighbours with the same leader
    stops = [*starts[1:], len(sampled_by)]

    def parts(turn: int) -> Iterator[bytes]:
        for indices in batched(range(starts[turn], stops[turn]), PART_ROWS):
            own = [
                (trained.samples.own[i], trained.advantages[i], trained.turn_advantages(i), trained.of_branches(i))
                for i in indices
            ]
            yield encoded(completion_row(trained.step, *row) for row in own)

    owners = [layout.leader_of(int(sampled_by[start])) for start in starts]
    return parts_to_first_rank(layout, owners, parts)


def completion_row(
    step: int,
    scored: ScoredRollout,
    advantage: float,
    turn_advantages: list[float] | None = None,
    of_branches: Sequence[float] = (),
) -> Row:
    """Return the row of a response that a step trains on. `of_branches` are the advantages of its branches' roles."""
    versions, response = scored.rollout.later_versions, response_row(scored)
    for branch, of_branch in zip(response.get("branches", ()), of_branches, strict=False):
        branch["advantage"] = of_branch
    return {
        "step": step,
        **response,
        "advantage": advantage,
        **({} if turn_advantages is None else {"turn_advantages": turn_advantages}),
        "weight_version": scored.rollout.weight_version,
        **({"extra": scored.extra} if scored.extra else {}),
        **({"later_versions": versions} if versions else {}),
    }


def response_row(scored: ScoredRollout) -> Row:
    """Return what training and evaluation record of a response."""
    rollout = scored.rollout
    return {
        **({"task": rollout.prompt.task} if rollout.prompt.task else {}),
        **({"role": scored.role} if scored.role else {}),
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.prompt.messages,
        "completion": rollout.text,
        **({} if rollout.dialogue is None else {"prompt_tokens": len(rollout.prompt.token_ids)}),
        "num_tokens": sum(sample.length for sample in (rollout, *rollout.branches)),
        "finish_reason": rollout.finish_reason,
        "reward": scored.reward,
        "rewards": scored.rewards,
        **part_columns(scored),
        **({} if rollout.stop_string is None else {"stop_string": rollout.stop_string}),
        **({} if rollout.forced is None else {"forced_tokens": rollout.forced}),
        **({} if rollout.dialogue is None else {"dialogue": rollout.dialogue.record()}),
        **({"branches": [_branch_row(branch, rollout) for branch in rollout.branches]} if rollout.branches else {}),
    }


def part_columns(scored: ScoredRollout) -> Row:
    """Return what is recorded of the rewards of turns and tokens: the reward that no token has, and the rewards of all
    turns of the trajectory, with weights and by function. Rewards of tokens are in dumps and in `tokens.jsonl`."""
    if scored.parts is None:
        return {}
    of_turns = {"turn_rewards": scored.parts.turns, "rewards_by_turn": scored.parts.by_turn}
    return {"outcome": scored.parts.outcome, **(of_turns if scored.parts.turns else {})}


def _branch_row(branch: Rollout, main: Rollout) -> Row:
    """Return what is recorded of a further sample of a trajectory. Of its context, `shared_messages` are the first ones
    of the `main` sample too, and `prompt` are the others."""
    mine, others = (_messages(sample) for sample in (branch, main))
    context = len(mine) - (len(branch.dialogue.messages) if branch.dialogue else 0)
    shared = sum(takewhile(bool, (one == other for one, other in zip(mine[:context], others, strict=False))))
    return {
        **({"role": branch.dialogue.role} if branch.dialogue and branch.dialogue.role else {}),
        "shared_messages": shared,
        "prompt": mine[shared:context],
        "prompt_tokens": len(branch.prompt.token_ids),
        "completion": branch.text,
        "num_tokens": branch.length,
        "finish_reason": branch.finish_reason,
        "weight_version": branch.weight_version,
        **({} if branch.forced is None else {"forced_tokens": branch.forced}),
        **({} if branch.dialogue is None else {"dialogue": branch.dialogue.record()}),
    }


def _messages(sample: Rollout) -> list[dict[str, Any]]:
    """Return the messages of prompt and response."""
    asked, dialogue = sample.prompt.messages, sample.dialogue
    opening = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return [*opening, *(dialogue.messages if dialogue else ())]


def table(rows: Rows) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and the cells of a table of completions: step, prompt, completion, each reward function,
    columns of `log_extra`, reward, advantage. A cell is text, a number, a boolean or None."""
    rewards, extra = _names(rows, "rewards"), _names(rows, "extra")
    columns = ["step", "prompt", "completion", *(f"rewards/{name}" for name in rewards), *extra, "reward", "advantage"]
    cells = [
        [
            *(row["step"], prompt_text(row["prompt"]), row["completion"]),
            *(row["rewards"].get(name) for name in rewards),
            *(row.get("extra", {}).get(name) for name in extra),
            *(row["reward"], row["advantage"]),
        ]
        for row in rows
    ]
    return columns, [list(map(_cell, line)) for line in cells]


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which have no UTF-8 bytes, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _names(rows: Rows, key: str) -> list[str]:
    """Return the names below `key` in any row, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.get(key, {})))


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text. A single message of the user is its content; other messages begin with their role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def best_and_worst(rows: Rows) -> list[Row]:
    """Return the rows of highest and lowest advantage of the first prompt with differing ones, else the first row."""
    groups: dict[int, list[tuple[float, int]]] = {}  # prompt_id -> advantage and index of each row
    for index, row in enumerate(rows):
        if (advantage := row["advantage"]) is not None and math.isfinite(advantage):
            groups.setdefault(row["prompt_id"], []).append((advantage, index))
    for group in groups.values():
        (worst, first), (best, last) = min(group), max(group)
        if worst < best:
            chosen = {index: row for index, row in enumerate(rows) if index in (first, last)}
            return [chosen[last], chosen[first]]
    return list(islice(rows, 1))
