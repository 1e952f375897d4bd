"""The facts of the samples of a step: a table with a row of numbers for each sample, which every rank holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np

from megagrpo.data.tokens.sampling import sampling_row
from megagrpo.types import CAUSES, ENDINGS, Prompt, Rollout, ScoredRollout

# bits of the column `flags`
TRUNCATED = 1  # finish_reason is "length"
KNOWS_STOP = 2  # the run has stop strings
STOPPED = 4  # one of them ended the response
DIALOGUE = 8  # the response has turns
OF_DIALOGUE = ("tool_calls", "tool_failures", "tool_shortened", "retries")
FAILED_DIALOGUE = 16  # its conversation failed
LIMITS_THOUGHTS = 32  # the run has a budget of thoughts
FORCED = 64  # the budget ended a thought


@dataclass(frozen=True)
class Columns:
    """The columns of a table of facts. They grow when a rollout has something new, and then on every rank.

    `rewards` are the names of the reward functions, `logged` of the numbers that they logged, `counters` of a replica's
    counters. Columns of conversations, of responses with several weight versions, of votes, of rows' own sampling
    parameters, of trajectories with several samples, of `roles` and of advantages of tokens exist only if needed.
    """

    rewards: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    dialogues: bool = False
    later_versions: bool = False
    votes: bool = False
    samplings: bool = False
    branches: bool = False
    token_advantages: bool = False
    roles: tuple[str, ...] = ()

    @classmethod
    def of(cls, scored: Sequence[ScoredRollout], counters: Mapping[str, float] | None = None) -> Columns:
        """Return the columns that these rollouts of a replica, and its counters, need."""
        rollouts = [r for s in scored for r in (s.rollout, *s.rollout.branches)]
        return cls(
            rewards=tuple(dict.fromkeys(name for s in scored for name in s.rewards)),
            logged=tuple(dict.fromkeys(name for s in scored for name in s.logged)),
            counters=tuple(counters or {}),
            dialogues=any(r.dialogue is not None or r.forced is not None for r in rollouts),
            later_versions=any(r.later_versions for r in rollouts),
            samplings=any(p.distribution or p.teachers is not None for p in (s.rollout.prompt for s in scored)),
            branches=len(rollouts) > len(scored),
            token_advantages=any(s.token_advantages for s in scored),
            roles=tuple(dict.fromkeys(r.dialogue.role for r in rollouts if r.dialogue and r.dialogue.role)),
        )

    def __or__(self, other: Columns) -> Columns:
        """Return the columns of both, those of `self` first."""
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        both: dict[str, Any] = {
            name: tuple(dict.fromkeys((*one, *two))) if isinstance(one, tuple) else one or two
            for (name, one), two in pairs
        }
        return Columns(**both)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The row of a sample: 37 bytes with one reward function and nothing else."""
        row: list[Any] = [
            ("reward", "f8"),
            ("rewards", "f8", (len(self.rewards),)),  # NaN where a function could not score
            ("logged", "f8", (len(self.logged),)),  # NaN if the call logged no such number
            ("version", "i4"),  # weight version of the first token
            ("length", "i4"),  # tokens of prompt and response
            ("prompt_length", "i4"),  # with the tokens of others at the beginning of the response
            ("prompt_key", "i8"),
            ("flags", "u1"),
        ]
        if self.dialogues:
            row += [(name, "i4") for name in ("response", "written", "turns", *OF_DIALOGUE)]
            row += [("ended", "u1"), ("cause", "u1")]  # indices into ENDINGS and CAUSES
            row += [("seconds", "f4", (5,))]  # as in `Dialogue`
        if self.later_versions:
            row += [("later", "i4")]  # sum over the tokens of their weight version minus the first one's
        if self.votes:
            row += [("vote", "f8")]  # of a group, on each of its samples
        if self.samplings:
            row += [("sampling", "i4")]  # words of `sampling_row`
        if self.branches:
            row += [("branches", "i4")]  # samples of the trajectory after its first
        if self.token_advantages:
            row += [("outcome", "f8")]  # the reward without the rewards of tokens
            row += [("lowest", "f8"), ("highest", "f8")]  # of what tokens add to the trajectory's advantage
        if self.roles:
            row += [("role", "i2")]  # index into `roles`; -1: none
        return np.dtype(row)


Vote = Callable[[Sequence[ScoredRollout]], float]  # a number of a group, from the texts of its responses


def votes_of(scored: Sequence[ScoredRollout], num_generations: int, vote: Vote | None) -> np.ndarray | None:
    """Return the vote of its group [n] for each of these rollouts of whole groups; None without `vote`."""
    if vote is None:
        return None
    return np.repeat([vote(group) for group in batched(scored, num_generations)], num_generations)


def facts_of(scored: Sequence[ScoredRollout], columns: Columns, votes: np.ndarray | None = None) -> np.ndarray:
    """Return the facts [n] of these rollouts, with `votes` [n] if the columns have them."""
    rows, rollouts = np.zeros(len(scored), columns.dtype), [s.rollout for s in scored]
    rows["reward"] = [s.reward for s in scored]
    if scored:
        rows["rewards"] = _numbers([s.rewards for s in scored], columns.rewards)
        rows["logged"] = _numbers([s.logged for s in scored], columns.logged)
    rows["version"] = [r.weight_version for r in rollouts]
    rows["length"] = [len(r.prompt.token_ids) + len(r.response_ids) for r in rollouts]
    rows["flags"] = [_flags(r) for r in rollouts]
    begins = [0 if r.dialogue is None else _first_written(r) for r in rollouts]
    rows["prompt_length"] = [len(r.prompt.token_ids) + begin for r, begin in zip(rollouts, begins, strict=True)]
    rows["prompt_key"] = prompt_keys(rollouts, begins)
    if columns.dialogues:
        _fill_dialogues(rows, rollouts, columns.roles)
    if columns.later_versions:
        rows["later"] = [(r.token_versions - r.weight_version).sum() if r.later_versions else 0 for r in rollouts]
    if votes is not None:
        rows["vote"] = votes
    if columns.samplings:
        rows["sampling"] = [sampling_row(r.prompt).size for r in rollouts]
    if columns.branches:
        rows["branches"] = [len(r.branches) for r in rollouts]
    if columns.token_advantages:
        rows["outcome"] = [s.outcome for s in scored]
        rows["lowest"], rows["highest"] = np.array([_bounds(s) for s in scored]).reshape(-1, 2).T
    return rows


def _fill_dialogues(rows: np.ndarray, rollouts: Sequence[Rollout], roles: Sequence[str]) -> None:
    """Fill the columns [n] of conversations. They stay 0 for responses without turns."""
    rows["response"], rows["written"] = [len(r.response_ids) for r in rollouts], [r.length for r in rollouts]
    dialogues = {index: r.dialogue for index, r in enumerate(rollouts) if r.dialogue is not None}
    if indices := [*dialogues]:
        rows["turns"][indices] = [len(dialogue.turns) for dialogue in dialogues.values()]
        for name in OF_DIALOGUE:
            rows[name][indices] = [getattr(dialogue, name) for dialogue in dialogues.values()]
        rows["ended"][indices] = [ENDINGS.index(dialogue.ended) for dialogue in dialogues.values()]
        rows["cause"][indices] = [CAUSES.index(dialogue.cause) for dialogue in dialogues.values()]
        rows["seconds"][indices] = [dialogue.seconds for dialogue in dialogues.values()]
    if roles:
        named = {index: dialogue.role for index, dialogue in dialogues.items() if dialogue.role}
        rows["role"] = [roles.index(named[i]) if i in named else -1 for i in range(len(rows))]


def _bounds(scored: ScoredRollout) -> tuple[float, float]:
    """Return the lowest and the highest of `token_advantages` at the tokens that the policy wrote; 0 without any."""
    own = scored.token_advantages[0][scored.rollout.written] if scored.token_advantages else np.zeros(0)
    return (float(own.min()), float(own.max())) if own.size else (0.0, 0.0)


def branch_facts_of(scored: Sequence[ScoredRollout], columns: Columns) -> np.ndarray:
    """Return the facts [m] of the further samples of these trajectories: lengths, prompts and versions of each, rewards
    and end of its trajectory."""
    own = [(s, branch) for s in scored for branch in s.branches]
    rows = facts_of([branch for _, branch in own], columns)
    ends = TRUNCATED + KNOWS_STOP + STOPPED
    rows["flags"] = [_flags(branch.rollout) & ~ends | _flags(s.rollout) & ends for s, branch in own]
    return rows


def _flags(rollout: Rollout) -> int:
    dialogue = rollout.dialogue
    return (
        TRUNCATED * (rollout.finish_reason == "length")
        + KNOWS_STOP * (rollout.stop_string is not None)
        + STOPPED * bool(rollout.stop_string)
        + LIMITS_THOUGHTS * (rollout.forced is not None)
        + FORCED * any(sample.forced for sample in rollout.samples)
        + (0 if dialogue is None else DIALOGUE + FAILED_DIALOGUE * (dialogue.ended == "failed"))
    )


def _numbers(values: Sequence[Mapping[str, float | None]], names: Sequence[str]) -> list[list[float]]:
    """Return the values with these names, NaN where there is none."""
    return [[math.nan if (value := by_name.get(name)) is None else value for name in names] for by_name in values]


def _first_written(rollout: Rollout) -> int:
    """Return the index of the first token that the policy wrote; without one the number of tokens."""
    return int(rollout.written.argmax()) if rollout.length else len(rollout.response_ids)


def prompt_keys(rollouts: Sequence[Rollout], begins: Sequence[int]) -> list[int]:
    """Return a 63-bit key of each rollout, equal for equal tokens of the prompt and of the response before `begins`,
    and the same `inputs`."""
    keys: list[int] = []
    last: tuple[Prompt, int] | None = None
    for rollout, begin in zip(rollouts, begins, strict=True):
        prompt = rollout.prompt
        if last is None or begin or last[0] is not prompt or last[1]:  # a group's samples have one prompt
            contents = prompt.token_ids, tuple(rollout.response_ids[:begin].tolist())
            seen = repr((*contents, prompt.prompt_id if prompt.inputs else None))
            keys.append(int.from_bytes(hashlib.blake2b(seen.encode(), digest_size=8).digest(), "big") >> 1)
        else:
            keys.append(keys[-1])
        last = prompt, begin
    return keys


def widened(facts: np.ndarray, dtype: np.dtype[np.void]) -> np.ndarray:
    """Return the rows with more columns. New rewards and logged numbers are NaN, new roles -1, other columns 0. The
    outcome is the reward."""
    rows = np.zeros(len(facts), dtype)
    if "outcome" in (dtype.names or ()):
        rows["outcome"] = facts["reward"]
    if "role" in (dtype.names or ()):
        rows["role"] = -1
    for name in facts.dtype.names or ():
        if shape := facts.dtype[name].shape:
            rows[name] = math.nan
            rows[name][:, : shape[0]] = facts[name]
        else:
            rows[name] = facts[name]
    return rows
