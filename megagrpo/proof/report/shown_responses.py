"""Chooses which steps, groups and responses the page holds, and compresses each step on its own.

A page holds the whole of a small run. Of a larger run it holds steps at even distances, the first, the last, the best
and the worst one, and of each step the groups that teach most, until the size limit is reached. Texts of one group at a
time are in memory.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from megagrpo.platform.process.terminal import printable
from megagrpo.proof.report.collect import STEP, WHOLE, Row, RunFiles, Span, lines_of, parsed
from megagrpo.proof.report.conversations import conversation_of
from megagrpo.proof.report.privacy import clean_row
from megagrpo.proof.report.reduce import number
from megagrpo.proof.report.shown_texts import messages_of, text_of
from megagrpo.records.checkpoints.run_files import COMPLETIONS

MAX_STEPS = 48  # per run
MAX_RESPONSES = 1_000_000  # of these steps, if they are large
MAX_SEARCH = 256 << 20  # bytes of groups in a row that do not fit, before the search for a smaller one ends
TOKEN_SHARE = 0.6  # of the responses' bytes, at most, for groups with tokens
MIN_ROOM = 4000  # bytes; less room is not filled
MAX_TOKENS = 1500  # of one response whose tokens are shown


@dataclass
class Chosen:
    """The responses of one run on the page: step -> compressed groups, and what is left out."""

    chunks: dict[int, str] = field(default_factory=dict)
    shown: dict[int, list[int]] = field(default_factory=dict)  # step -> [groups on the page, groups of the step]
    responses: list[int] = field(default_factory=lambda: [0, 0])  # responses on the page, responses of the run


def choose(run: RunFiles, budget: int) -> Chosen:
    """Return the responses of the run that fit into `budget` bytes of the page."""
    largest = max((step.count for step in run.responses.values()), default=1)
    steps = chosen_steps(run, sorted(run.responses), max(4, min(MAX_STEPS, MAX_RESPONSES // largest)))
    sizes = {*run.group_sizes.values()}
    size = sizes.pop() if len(sizes) == 1 else None
    found = index_steps(run, steps, size)
    chosen, room = Chosen(), budget * 3 // 4  # base64 takes four characters for three bytes
    taken: dict[int, dict[int, bytes]] = {step: {} for step in found}
    token_room, searched = room * TOKEN_SHARE, 0
    for step, index in offers(found):
        group = read_group(run, found[step], index)
        if not group["responses"]:
            continue
        packed = _compressed([group])
        if _has_tokens(group):
            if len(packed) > token_room:
                packed = _compressed([without_tokens(group)])
            else:
                token_room -= len(packed)
        if len(packed) <= room:
            room -= len(packed)
            searched = 0
            taken[step][index] = packed
            chosen.responses[0] += len(group["responses"])
        elif room < MIN_ROOM or (searched := searched + found[step].num_bytes(index)) > MAX_SEARCH:
            break
    for step, groups in taken.items():
        if groups:
            texts = b",".join(gzip.decompress(groups[i])[1:-1] for i in sorted(groups))
            chosen.chunks[step] = base64.b64encode(_gzip(b"[" + texts + b"]")).decode()
            chosen.shown[step] = [len(groups), len(found[step])]
    chosen.responses[1] = sum(step.count for step in run.responses.values())
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


def offers(groups: dict[int, StepIndex]) -> Iterator[tuple[int, int]]:
    """Yield (step, index of the group): the most interesting group of every step, then the second one, and so on.

    A round's steps are the last, the first, then steps between, so that a page with little room still covers the run.
    """
    steps = sorted(groups)
    # by the largest power of 2 in the index
    spread = sorted(range(len(steps)), key=lambda i: (i != len(steps) - 1, i != 0, -(i & -i)))
    ranked = {step: array("L", ranking(of_step)) for step, of_step in groups.items()}
    for rank in range(max(map(len, ranked.values()), default=0)):
        for i in spread:
            if rank < len(ranked[steps[i]]):
                yield steps[i], ranked[steps[i]][rank]


def read_group(run: RunFiles, index: StepIndex, group: int) -> dict[str, Any]:
    """Return a group of a step, as shown. A response that cannot be read is missing."""
    numbers = index.responses(group)
    numbered = zip(numbers, rows_at(run, COMPLETIONS, index.places[numbers.start : numbers.stop]), strict=True)
    rows = {response: row for response, row in numbered if row is not None}
    for response in rows.keys() & index.tokens.keys():
        rows[response]["tokens"] = next(rows_at(run, TOKENS, [index.tokens[response]]))
    prompt = common_prompt([row.get("prompt") for row in rows.values()])
    masks = run.setting("algorithm.mask_truncated_completions") is True
    first = next(iter(rows.values()), None)
    known = {} if first is None else {"prompt_id": first.get("prompt_id"), "task": text_of(first.get("task", ""))}
    return known | {
        "prompt": messages_of(prompt),
        "responses": [_response(row, len(prompt) if isinstance(prompt, list) else 1, masks) for row in rows.values()],
    }


def common_prompt(prompts: Sequence[Any]) -> Any:
    """Return the prompt of a group. Agents that edit their history have responses to several ones: then it is the
    messages with which all of them begin, if there are any."""
    first = prompts[0] if prompts else None
    if not isinstance(first, list) or all(prompt == first for prompt in prompts):
        return first
    count = min(_common(first, prompt) for prompt in prompts)
    return first[:count] or first


def _common(one: list[Any], other: Any) -> int:
    """Return the number of messages with which both begin."""
    others = other if isinstance(other, list) else []
    return next(
        (i for i, pair in enumerate(zip(one, others, strict=False)) if pair[0] != pair[1]), min(len(one), len(others))
    )


def ranking(groups: StepIndex) -> list[int]:
    """Return the indices of a step's groups by interest: with tokens, then best and worst, then by reward spread."""
    moments = [_moments(groups.rewards_of(group)) for group in range(len(groups))]
    by_mean = [mean for mean, _ in moments]
    extremes = {by_mean.index(max(by_mean)), by_mean.index(min(by_mean))} if moments else set()
    with_tokens = groups.with_tokens()
    return sorted(
        range(len(groups)),
        key=lambda i: (i not in with_tokens, i not in extremes, -moments[i][1], i),
    )


@lru_cache(maxsize=1024)
def _moments(rewards: tuple[float, ...]) -> tuple[float, float]:
    """Return mean and standard deviation; 0 without rewards."""
    return (statistics.fmean(rewards), statistics.pstdev(rewards)) if rewards else (0.0, 0.0)


def without_tokens(group: dict[str, Any]) -> dict[str, Any]:
    """Return the group without the numbers of its tokens; the texts stay."""
    responses = [
        {name: value for name, value in response.items() if name != "tokens"} for response in group["responses"]
    ]
    return group | {"responses": responses}


def _has_tokens(group: dict[str, Any]) -> bool:
    return any("tokens" in response for response in group["responses"])


def _response(row: Row, num_prompt: int, masks: bool) -> dict[str, Any]:
    """Return a response as shown. `num_prompt` messages of its prompt are shown as the prompt of the group."""
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
    if masks and response["cut"]:
        response["masked"] = True
    prompt = row.get("prompt")
    context = prompt[num_prompt:] if isinstance(prompt, list) else []
    if (conversation := conversation_of(row, context, num_prompt)) is not None:
        response["conversation"] = conversation
    if isinstance(tokens := row.get("tokens"), dict) and isinstance(tokens.get("tokens"), list):
        response["tokens"] = _tokens(tokens)
    return response


def _tokens(row: Row) -> dict[str, Any]:
    """Return texts, vLLM's log-probs, trainer minus vLLM, entropies and, if logged, advantages of the tokens, at most
    `MAX_TOKENS`."""
    texts = [printable(str(text)) for text in row["tokens"]]
    count = min(len(texts), MAX_TOKENS)
    names = ("rollout_logprobs", "trainer_logprobs", "entropy")
    engine, trainer, entropy = ([*_numbers(row.get(name)), *[None] * count][:count] for name in names)
    difference = [None if t is None or e is None else round(t - e, 3) for t, e in zip(trainer, engine, strict=True)]
    short = {"engine": engine, "entropy": entropy}
    if advantages := _numbers(row.get("advantages")):
        short["advantage"] = [*advantages, *[None] * count][:count]
    numbers = {name: [None if value is None else round(value, 2) for value in values] for name, values in short.items()}
    return {"text": texts[:count], "difference": difference, "left_out": len(texts) - count, **numbers}


def _numbers(values: Any) -> list[float | None]:
    return (
        [v if isinstance(v, (int, float)) and math.isfinite(v) else None for v in values]
        if isinstance(values, list)
        else []
    )


def _compressed(groups: Sequence[dict[str, Any]]) -> bytes:
    return _gzip(json.dumps(list(groups), ensure_ascii=False, separators=(",", ":")).encode())


def _gzip(text: bytes) -> bytes:
    return gzip.compress(text, 6, mtime=0)


TOKENS = "tokens.jsonl"


@dataclass
class StepIndex:
    """The groups of one step, in order. 24 bytes a response and about 50 bytes a group."""

    places: array[int] = field(default_factory=lambda: array("Q"))  # [responses] byte at which the line begins
    rewards: array[float] = field(default_factory=lambda: array("d"))  # [responses]; NaN if there is none
    starts: array[int] = field(default_factory=lambda: array("Q"))  # [groups] first response
    prompt_ids: list[Any] = field(default_factory=list)  # [groups]
    tokens: dict[int, int] = field(default_factory=dict)  # response -> byte at which its line of tokens begins

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, prompt_id: Any, reward: float | None, place: int, size: int | None) -> None:
        """Add the next response. `size` is that of full groups, if known."""
        if not self.starts or prompt_id != self.prompt_ids[-1] or len(self.places) - self.starts[-1] == size:
            self.starts.append(len(self.places))
            self.prompt_ids.append(prompt_id)
        self.places.append(place)
        self.rewards.append(math.nan if reward is None else reward)

    def responses(self, group: int) -> range:
        """Return the responses of a group."""
        return range(self.starts[group], self.starts[group + 1] if group + 1 < len(self) else len(self.places))

    def num_bytes(self, group: int) -> int:
        """Return about how many bytes the lines of a group have."""
        responses, last = self.responses(group), len(self.places) - 1
        return self.places[min(responses.stop, last)] - self.places[responses.start]

    def rewards_of(self, group: int) -> tuple[float, ...]:
        """Return the rewards of a group, without missing ones."""
        responses = self.responses(group)
        return tuple(r for r in self.rewards[responses.start : responses.stop] if not math.isnan(r))

    def with_tokens(self) -> set[int]:
        """Return the groups of which a response has tokens."""
        return {self.group_of(response) for response in self.tokens}

    def group_of(self, response: int) -> int:
        """Return the group of a response."""
        return bisect_right(self.starts, response) - 1


def index_steps(run: RunFiles, steps: Sequence[int], size: int | None) -> dict[int, StepIndex]:
    """Return the groups of the steps that have responses. `size` is the number of responses per prompt, if known."""
    found = {step: StepIndex() for step in steps}
    spans = [(run.responses[step].start, run.responses[step].stop) for step in steps]
    for place, row in _rows(run, COMPLETIONS, found, spans):
        found[row["step"]].add(row.get("prompt_id"), number(row.get("reward")), place, size)
    for place, row in _rows(run, TOKENS, found):
        _add_tokens(found[row["step"]], row, place)
    return {step: index for step, index in found.items() if len(index)}


def _rows(run: RunFiles, name: str, steps: Collection[int], spans: Iterable[Span] = WHOLE) -> Iterator[tuple[int, Row]]:
    """Yield the rows of these steps after the byte at which each begins. Lines of other steps are not parsed."""
    for place, line in lines_of(run.folder / name, spans):
        if (match := STEP.match(line)) and int(match[1]) not in steps:
            continue
        if (row := parsed(line, name, run.damaged)) is not None and row["step"] in steps:
            yield place, row


def rows_at(run: RunFiles, name: str, places: Iterable[int]) -> Iterator[Row | None]:
    """Yield the rows that begin at bytes of a file, without what the page hides; None for one that cannot be read."""
    with open(run.folder / name, "rb") as file:
        for place in places:
            file.seek(place)
            row = parsed(file.readline(), name, run.damaged)
            yield None if row is None else clean_row(row)


def _add_tokens(index: StepIndex, row: Row, place: int) -> None:
    """Add a line of tokens to its response, unless it belongs to another one. The last line of a response counts."""
    sample = row.get("sample")
    if not isinstance(sample, int) or not 0 <= sample < len(index.places):
        return
    if index.prompt_ids[index.group_of(sample)] != row.get("prompt_id"):
        return
    index.tokens.pop(sample, None)
    if isinstance(clean_row(row).get("tokens"), list):
        index.tokens[sample] = place
