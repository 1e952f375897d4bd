"""Tries a reward function: each row's gold, other rows' golds and empty responses, with counts of what scores best."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import batched

import numpy as np

from megagrpo.data.sources.text_rows import nested
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.data_checks.golds import GoldColumn, in_form, wrong_answers
from megagrpo.types import Prompt, Rollout

ROWS = 64  # rows that are tried
TRIAL_SECONDS = 15.0  # after this time no more rows are tried with a function
ROWS_AT_ONCE = 8  # rows between two looks at the clock
PAIR = 2  # equal responses of a group: with one, a function that returns one value for all would pass
WRONG_GOLDS = 2  # golds of other rows that are tried per row; of a program one
REPEATED_WORD = "again "  # a long response repeats this
PROGRAM_KIND = "program"  # kind of a gold


type RowFault = tuple[int, str]  # a row, and why a function cannot score it


@dataclass(frozen=True)
class RowTrial:
    """The values of one row: of its own gold in the form that scores most, of another row's gold in this form, and of
    an empty response.
    None: cannot be scored. `best`: the gold scores more than the other two. `gold` is empty for a row without one."""

    row: int
    gold: str
    value: float | None
    other: float | None
    empty: float | None
    best: bool


@dataclass
class RewardTrial:
    """What one reward function gives on `rows` of the `num_rows` rows that were chosen; fewer when the time is over.

    `column` holds the gold, `kind` is the type of its values or "program", and `form` the form in which most golds
    score best. `needs_gold`: the function names a column of the data; `reads_columns`: it takes one. `opened` is the
    thought that prompts open.
    Counts of rows: `best`: the gold scores more than an empty response and another row's gold; `unscored`: the gold
    gets None; `without_gold`; `too_long`: the gold has more than `limit` tokens, `longest` is (row, tokens) of the
    longest; `failed`: the function fails, `failure` says how. `row_faults` are the rows that the function says it
    cannot score; None if it does not look.
    `gold`, `other` and `empty` are means of the values, `milliseconds` the mean time of a response. `constant`: all
    values are equal.
    """

    data: str
    function: str
    weight: float
    column: str
    kind: str
    form: str
    reads_columns: bool
    needs_gold: bool
    opened: str
    num_rows: int
    rows: int
    best: int
    unscored: int
    without_gold: int
    too_long: int
    longest: tuple[int, int]
    limit: int
    failed: int
    failure: str
    row_faults: list[RowFault] | None
    gold: float | None
    other: float | None
    empty: float | None
    milliseconds: float
    constant: bool
    trials: list[RowTrial]


@dataclass(eq=False)
class _Row:
    """A row while it is tried. `golds` maps a form to the value of the row's gold and the values of wrong answers."""

    prompt: Prompt
    gold: str | None
    wrong: list[str]
    empty: float | None = None
    golds: dict[str, tuple[float | None, list[float | None]]] = field(default_factory=dict)
    best: str = ""  # the form in which the gold scores best
    failed: bool = False


@dataclass(frozen=True)
class Means:
    """What a trial uses. A long response has `max_tokens` tokens. After `seconds` no more rows are tried."""

    scorer: RewardScorer
    tokenizer: Tokenizer
    max_tokens: int
    seconds: float = TRIAL_SECONDS


class FunctionTrial:
    """The trial of the function `name` on the rows of `prompts`, whose golds are in the column `golds`. A function that
    asks a `service` gets one row, in one form."""

    def __init__(
        self, means: Means, name: str, prompts: Sequence[Prompt], golds: GoldColumn | None, service: bool = False
    ):
        self._means, self._name, self._golds = means, name, golds
        self._column = golds.name if golds else ""
        self._ends = time.monotonic() + means.seconds
        self._forms = [*golds.forms[: 1 if service else None]] if golds else []
        texts = [golds.gold(prompt) if golds else None for prompt in prompts]
        wrong = 1 if golds and golds.holds_programs else WRONG_GOLDS
        rows = [_Row(prompt, texts[i], wrong_answers(texts, i, wrong)) for i, prompt in enumerate(prompts)]
        self._function = means.scorer.functions[name]
        self.weight = self._function.weight
        self.rows: list[_Row] = []  # the rows that were tried
        self.failure = ""
        self._seen: set[float | None] = set()
        self._seconds, self._responses = 0.0, 0
        self._num_rows = len(rows)
        self._run(rows[: 1 if service else None])

    def _run(self, rows: list[_Row]) -> None:
        """Try the first row, then parts of the others, until the time is over or the function fails."""
        for part in [rows[:1], *map(list, batched(rows[1:], ROWS_AT_ONCE))]:
            if self.rows and (self.failure or time.monotonic() > self._ends):
                break
            self.rows += part
            self._try(part)

    def _try(self, rows: list[_Row]) -> None:
        empty = self._score(rows, [[""] * PAIR for _ in rows], "an empty response")
        for row, (value, *_) in zip(rows, empty, strict=True):
            row.empty = value
        tries_all = rows[0] is self.rows[0]  # the first row decides which form comes first
        for form in self._forms:
            left = [row for row in rows if row.gold is not None and (tries_all or not row.best)]
            if not left or self.failure:
                break
            if time.monotonic() > self._ends and not tries_all:
                self.rows = [row for row in self.rows if row not in left]  # what they score is not known
                break
            texts = [[in_form(form, text, row.prompt.opened) for text in (row.gold or "", *row.wrong)] for row in left]
            values = self._score(left, texts, f"a gold of column `{self._column}`")
            for row, (gold, *wrong) in zip(left, values, strict=True):
                row.golds[form] = gold, wrong
                if self._is_best(gold, wrong, row.empty) and (
                    not row.best or self._worth(gold) > self._worth(row.golds[row.best][0])
                ):
                    row.best = form
        used = Counter(row.best for row in self.rows if row.best)
        self._forms.sort(key=lambda form: -used[form])  # the next rows begin with the form that this function reads

    def _is_best(self, gold: float | None, wrong: list[float | None], empty: float | None) -> bool:
        worth, others = self._worth(gold), [self._worth(value) for value in wrong]
        return gold is not None and worth > max(self._worth(empty), min(others)) and worth >= max(others)

    def _worth(self, value: float | None) -> float:
        return -math.inf if value is None else value * (self.weight or 1.0)

    def _score(self, rows: list[_Row], texts: list[list[str]], what: str) -> list[list[float | None]]:
        """Return the values of each row's texts. A row's texts are one group, as in training."""
        with ExitStack() as stack:
            scorings = [stack.enter_context(self._means.scorer.begin(names=[self._name])) for _ in rows]
            for scoring, row, group in zip(scorings, rows, texts, strict=True):
                scoring.add(0, [response(row.prompt, self._means.tokenizer, text) for text in group])
            values = [[scored.rewards[self._name] for scored in scoring.finish()] for scoring in scorings]
        for row, scoring, own in zip(rows, scorings, values, strict=True):
            counters = {name.rpartition("/")[2]: count for name, count in scoring.counters().items()}
            self._seconds += counters["seconds"]
            self._responses += len(own)
            if counters["exceptions"] or counters["timeouts"]:
                row.failed = True
                error = self._means.scorer.tracebacks.get(self._name, "").strip().split("\n")[-1]
                reason = "no result in time" if counters["timeouts"] else error
                text = f"`{self._name}` fails for {what}, row {row.prompt.prompt_id}: {reason}; correct the function"
                self.failure = self.failure or text
            else:
                self._seen.update(own)
        return values

    def is_constant(self) -> bool:
        """Whether every response got the same value, a long one included."""
        if self.failure or len(self._seen) != 1 or not any(row.gold for row in self.rows):
            return False
        long = response(self.rows[0].prompt, self._means.tokenizer, REPEATED_WORD)
        ids = np.resize(long.response_ids, self._means.max_tokens)
        long = replace(
            long,
            response_ids=ids,
            rollout_logprobs=np.zeros(len(ids), np.float32),
            text=REPEATED_WORD * len(ids),
            finish_reason="length",
        )
        with self._means.scorer.begin(names=[self._name]) as scoring:
            scoring.add(0, [long] * PAIR)
            return {scored.rewards[self._name] for scored in scoring.finish()} == self._seen

    def reads_gold(self) -> bool:
        """Whether a value depends on the row: a response that is the gold of one row and wrong for another one must
        differ for both."""
        own = {(form, row.gold): value for row in self.rows for form, (value, _) in row.golds.items()}
        pairs = [
            (own[form, text], value)
            for row in self.rows
            for form, (_, values) in row.golds.items()
            for text, value in zip(row.wrong, values, strict=True)
            if (form, text) in own
        ]
        return not pairs or any(value != other for value, other in pairs)

    def result(self, data: str, faults: list[RowFault] | None) -> RewardTrial:
        """Return the counts. `faults` are the rows that the function says it cannot score; None if it does not look."""
        reads, columns = self.reads_gold(), self.rows[0].prompt.columns
        trials = [self._row_trial(row, reads) for row in self.rows]
        tried = [trial for trial, row in zip(trials, self.rows, strict=True) if row.golds]
        forms = Counter(row.best for row in self.rows if row.best and reads)
        lengths = [
            (len(self._means.tokenizer.encode(row.gold or "", add_special_tokens=False)), row.prompt.prompt_id)
            for row in self.rows
        ]
        (longest, row), too_long = max(lengths), sum(length > self._means.max_tokens for length, _ in lengths)
        return RewardTrial(
            data=data,
            function=self._name,
            weight=self.weight,
            column=self._column,
            kind=self._kind(),
            form=forms.most_common(1)[0][0] if forms else "",
            reads_columns=any(map(self._function.takes, columns)),
            needs_gold=bool(self._function.signature["needs"]),
            opened=self.rows[0].prompt.opened.strip(),
            num_rows=self._num_rows,
            rows=len(trials),
            best=sum(trial.best for trial in trials),
            unscored=sum(trial.value is None for trial in tried),
            without_gold=sum(not trial.gold for trial in trials),
            too_long=too_long,
            longest=(row, longest),
            limit=self._means.max_tokens,
            failed=sum(row.failed for row in self.rows),
            failure=self.failure,
            row_faults=faults,
            gold=_mean(trial.value for trial in tried),
            other=_mean(trial.other for trial in tried),
            empty=_mean(trial.empty for trial in trials),
            milliseconds=1000 * self._seconds / max(1, self._responses),
            constant=self.is_constant(),
            trials=trials,
        )

    def _kind(self) -> str:
        if self._golds is None or self._golds.holds_programs:
            return PROGRAM_KIND if self._golds else ""
        return next((type(nested(row.prompt.columns, self._golds.name)).__name__ for row in self.rows if row.gold), "")

    def _row_trial(self, row: _Row, reads: bool) -> RowTrial:
        form = row.best or max(row.golds, key=lambda form: self._worth(row.golds[form][0]), default="")
        value, wrong = row.golds.get(form, (None, [None]))
        other = max(wrong, key=self._worth)
        return RowTrial(row.prompt.prompt_id, row.gold or "", value, other, row.empty, bool(row.best) and reads)


def response(prompt: Prompt, tokenizer: Tokenizer, text: str) -> Rollout:
    """Return a response to the prompt with this text."""
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    return Rollout(prompt, token_ids, np.zeros(len(token_ids), np.float32), "stop", 0, text)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
