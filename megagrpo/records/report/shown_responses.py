"""Chooses which steps, groups and responses the page holds, and compresses each step on its own.

A page holds the whole of a small run. Of a larger run it holds steps at even distances, the first, the last, the best
and the worst one, and of each step the groups that teach most, until the size limit is reached.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.platform.process.terminal import printable
from megagrpo.records.report.collect import Row, RunFiles, read_lines
from megagrpo.records.report.reduce import number
from megagrpo.records.run_files import COMPLETIONS

TOKENS = "tokens.jsonl"
MAX_STEPS = 48  # per run
TOKEN_SHARE = 0.6  # of the responses' bytes, at most, for groups with tokens
MIN_ROOM = 4000  # bytes; less room is not filled
MAX_CHARACTERS = 4000  # of one response, and of one message of a prompt
MAX_TOKENS = 1500  # of one response whose tokens are shown
LEFT_OUT = "\n[… {:,} characters left out …]\n"


@dataclass
class Chosen:
    """The responses of one run on the page: step -> compressed groups, and what is left out."""

    chunks: dict[int, str] = field(default_factory=dict)
    shown: dict[int, list[int]] = field(default_factory=dict)  # step -> [groups on the page, groups of the step]
    responses: list[int] = field(default_factory=lambda: [0, 0])  # responses on the page, responses of the run
    prompts: set[str] = field(default_factory=set)  # keys of the prompts on the page


def choose(run: RunFiles, budget: int, prompts: Collection[str] = ()) -> Chosen:
    """Return the responses of the run that fit into `budget` bytes of the page. Groups of `prompts`, which other runs
    on the page show, come first."""
    steps = chosen_steps(run, sorted(run.rewards))
    setting = run.setting("rollout.num_generations")
    size = setting if isinstance(setting, int) and setting > 0 else None
    groups = {step: groups_of(rows, size) for step, rows in _rows_by_step(run, steps).items()}
    chosen, room = Chosen(), budget * 3 // 4  # base64 takes four characters for three bytes
    taken: dict[int, list[int]] = {step: [] for step in groups}
    token_room = room * TOKEN_SHARE
    for step, index in offers(groups, prompts):
        group = groups[step][index]
        size = len(_compressed([group]))
        if _has_tokens(group):
            if size > token_room:
                group = groups[step][index] = without_tokens(group)
                size = len(_compressed([group]))
            else:
                token_room -= size
        if size <= room:
            room -= size
            taken[step].append(index)
        elif room < MIN_ROOM:
            break
    for step, indices in taken.items():
        if indices:
            chosen.chunks[step] = base64.b64encode(_compressed([groups[step][i] for i in sorted(indices)])).decode()
            chosen.shown[step] = [len(indices), len(groups[step])]
            chosen.responses[0] += sum(len(groups[step][i]["responses"]) for i in indices)
            chosen.prompts |= {prompt_key(groups[step][i]) for i in indices}
    chosen.responses[1] = sum(step.count for step in run.rewards.values())
    return chosen


def chosen_steps(run: RunFiles, steps: Sequence[int], most: int = MAX_STEPS) -> list[int]:
    """Return at most `most` steps: the first, the last, those of best and worst reward, others at even distances."""
    if len(steps) <= most:
        return list(steps)
    recorded = set(steps)
    rewards = {
        row["step"]: value
        for row in run.steps
        if (value := number(row.get("reward"))) is not None and row["step"] in recorded
    }
    special = (
        {max(rewards, key=lambda s: (rewards[s], -s)), min(rewards, key=lambda s: (rewards[s], s))}
        if rewards
        else set()
    )
    even = most - len(special)
    return sorted(special | {steps[round(i * (len(steps) - 1) / (even - 1))] for i in range(even)})


def offers(groups: dict[int, list[dict[str, Any]]], prompts: Collection[str] = ()) -> Iterator[tuple[int, int]]:
    """Yield (step, index of the group): the most interesting group of every step, then the second one, and so on.

    A round's steps are the last, the first, then steps between, so that a page with little room still covers the run.
    """
    steps = sorted(groups)
    # by the largest power of 2 in the index
    spread = sorted(range(len(steps)), key=lambda i: (i != len(steps) - 1, i != 0, -(i & -i)))
    ranked = {step: ranking(of_step) for step, of_step in groups.items()}
    if prompts:
        ranked = {
            step: sorted(order, key=lambda i: prompt_key(groups[step][i]) not in prompts)
            for step, order in ranked.items()
        }
    for rank in range(max(map(len, ranked.values()), default=0)):
        for i in spread:
            if rank < len(ranked[steps[i]]):
                yield steps[i], ranked[steps[i]][rank]


def groups_of(rows: Sequence[Row], size: int | None) -> list[dict[str, Any]]:
    """Return one step's groups, in order, as shown. `size` is the number of responses per prompt, if known."""
    cuts = [0]
    for i in range(1, len(rows)):
        same = rows[i].get("prompt_id") == rows[i - 1].get("prompt_id")
        if not same or (size and i - cuts[-1] == size):
            cuts.append(i)
    parts = [rows[a:b] for a, b in zip(cuts, [*cuts[1:], len(rows)], strict=True)]
    return [_group(part) for part in parts]


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    prompt = messages_of(rows[0].get("prompt"))
    return {"prompt_id": rows[0].get("prompt_id"), "prompt": prompt, "responses": [_response(row) for row in rows]}


def prompt_key(group: dict[str, Any]) -> str:
    """Return what identifies a prompt in the runs of a page: its text."""
    return json.dumps(group["prompt"])


def messages_of(prompt: Any) -> list[list[str]]:
    """Return a prompt as pairs of role and text."""
    if not isinstance(prompt, list):
        return [["user", text_of(prompt)]]
    return [
        [text_of(m.get("role", "")), text_of(m.get("content"))] if isinstance(m, dict) else ["", text_of(m)]
        for m in prompt
    ]


def text_of(value: Any) -> str:
    """Return a value as printable text; of a long one the beginning and the end."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_CHARACTERS:
        first = MAX_CHARACTERS * 3 // 4
        last = MAX_CHARACTERS - first
        text = text[:first] + LEFT_OUT.format(len(text) - MAX_CHARACTERS) + text[-last:]
    return printable(text)


def ranking(groups: Sequence[dict[str, Any]]) -> list[int]:
    """Return the indices of a step's groups by interest: with tokens, then best and worst, then by reward spread."""

    def rewards(group: dict[str, Any]) -> list[float]:
        return [r["reward"] for r in group["responses"] if r["reward"] is not None]

    spread = [statistics.pstdev(values) if (values := rewards(group)) else 0.0 for group in groups]
    mean = [statistics.fmean(values) if (values := rewards(group)) else 0.0 for group in groups]
    extremes = (
        {max(range(len(groups)), key=mean.__getitem__), min(range(len(groups)), key=mean.__getitem__)}
        if groups
        else set()
    )
    with_tokens = [_has_tokens(group) for group in groups]
    return sorted(range(len(groups)), key=lambda i: (not with_tokens[i], i not in extremes, -spread[i], i))


def without_tokens(group: dict[str, Any]) -> dict[str, Any]:
    """Return the group without the numbers of its tokens; the texts stay."""
    responses = [
        {name: value for name, value in response.items() if name != "tokens"} for response in group["responses"]
    ]
    return group | {"responses": responses}


def _has_tokens(group: dict[str, Any]) -> bool:
    return any("tokens" in response for response in group["responses"])


def _rows_by_step(run: RunFiles, steps: Sequence[int]) -> dict[int, list[Row]]:
    chosen = set(steps)
    rows: dict[int, list[Row]] = {step: [] for step in steps}
    for row in read_lines(run.folder / COMPLETIONS, run.damaged, chosen):
        rows[row["step"]].append(run.privacy.row(row))
    for row in read_lines(run.folder / TOKENS, run.damaged, chosen):
        of_step, sample = rows[row["step"]], row.get("sample")
        if (
            isinstance(sample, int)
            and 0 <= sample < len(of_step)
            and of_step[sample].get("prompt_id") == row.get("prompt_id")
        ):
            of_step[sample]["tokens"] = run.privacy.row(row)
    return {step: of_step for step, of_step in rows.items() if of_step}


def _response(row: Row) -> dict[str, Any]:
    rewards = row.get("rewards")
    response: dict[str, Any] = {
        "text": text_of(row.get("completion")),
        "reward": number(row.get("reward")),
        "rewards": {printable(str(name)): number(value) for name, value in rewards.items()}
        if isinstance(rewards, dict)
        else {},
        "advantage": number(row.get("advantage")),
        "length": number(row.get("num_tokens")),
        "cut": row.get("finish_reason") == "length",
        "version": number(row.get("weight_version")),
    }
    if isinstance(extra := row.get("extra"), dict):
        response["extra"] = {printable(str(name)): text_of(value) for name, value in extra.items()}
    if isinstance(dialogue := row.get("dialogue"), dict):
        response["dialogue"] = messages_of(dialogue.get("messages"))
    if isinstance(tokens := row.get("tokens"), dict) and isinstance(tokens.get("tokens"), list):
        response["tokens"] = _tokens(tokens)
    return response


def _tokens(row: Row) -> dict[str, Any]:
    """Return texts, vLLM's log-probs, trainer minus vLLM, and entropies of the tokens, at most `MAX_TOKENS`."""
    texts = [printable(str(text)) for text in row["tokens"]]
    count = min(len(texts), MAX_TOKENS)
    names = ("rollout_logprobs", "trainer_logprobs", "entropy")
    engine, trainer, entropy = ([*_numbers(row.get(name)), *[None] * count][:count] for name in names)
    difference = [None if t is None or e is None else round(t - e, 3) for t, e in zip(trainer, engine, strict=True)]
    short = {"engine": engine, "entropy": entropy}
    numbers = {name: [None if value is None else round(value, 2) for value in values] for name, values in short.items()}
    return {"text": texts[:count], "difference": difference, "left_out": len(texts) - count, **numbers}


def _numbers(values: Any) -> list[float | None]:
    return (
        [v if isinstance(v, (int, float)) and math.isfinite(v) else None for v in values]
        if isinstance(values, list)
        else []
    )


def _compressed(groups: Sequence[dict[str, Any]]) -> bytes:
    return gzip.compress(json.dumps(list(groups), ensure_ascii=False, separators=(",", ":")).encode(), 6, mtime=0)
