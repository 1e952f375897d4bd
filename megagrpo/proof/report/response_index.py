"""Finds the groups of a step in `completions.jsonl`: their rewards and the places of their lines, not their texts."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megagrpo.proof.report.collect import STEP, WHOLE, Row, RunFiles, Span, lines_of, parsed
from megagrpo.proof.report.privacy import clean_row
from megagrpo.proof.report.reduce import number
from megagrpo.records.checkpoints.run_files import COMPLETIONS

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
