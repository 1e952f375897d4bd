"""Prompts that a user's data source (`data.source`) chooses. Rank 0 calls the source; other ranks get row numbers."""

from __future__ import annotations

import base64
import copy
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.images.prompt_images import storable
from megagrpo.data.packing.sample_table import TRUNCATED
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.user_source import DataSource, Group, Progress, Row, load_source
from megagrpo.engine.http.protocol import EngineError
from megagrpo.platform.parallel.agree import RankError, on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process import user_code
from megagrpo.train_types import TrainState
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.types import Prompt

ATTEMPTS = 100  # calls of `next` in a row that return overlong rows only
NEW = -1  # stands for a new row in a message of row numbers


class SourceFailed(RuntimeError):
    """The user's data source raised, or returned what a run cannot use. Raised on rank 0, which runs it."""


class SourcedPrompts(PromptOrder):
    """The prompts that a data source chooses, in a queue from the cursor on. All methods are collective.

    `order` has the contents of the data set's rows. With `rollout.max_staleness` the queue holds the prompts that were
    requested ahead. The source, its state and the metrics that it returns exist on rank 0 only. A new row has the
    `prompt_id` `first_new` plus its place, and its columns travel once, to all ranks.
    """

    def __init__(
        self, order: PromptOrder, layout: Layout, config: RunConfig, key: str = "data.source", first_id: int = 0
    ):
        super().__init__(order.rows, config.data, config.run.seed)
        self.response_lengths, self.warnings = order.response_lengths, order.warnings
        self.identity = order.identity
        self._order, self._layout, self._config, self._step = order, layout, config, 0
        self._key, self._first_id = key, first_id  # of the class; of row 0 in the run, with tasks
        self._queue: list[int] = []  # prompt_ids of the places from the cursor on
        self._decoded: set[int] = set()  # rows whose images can be decoded
        self._new: dict[int, dict[str, Any]] = {}  # prompt_id -> columns, of new rows in the queue
        self._drawn: dict[int, dict[str, Any]] = {}  # columns of new rows that were drawn since the last `store`
        self.first_new = order.rows[-1] + 1
        self._source: DataSource | None = run_own_and_agree(layout, self._load)
        methods = on_first_rank(layout, lambda: [hasattr(self._source, name) for name in ("learn", "keep")])
        self._learns, self.keeps = methods

    def _load(self) -> DataSource | None:
        if not isinstance(self._order, PromptSource) or self._layout.world_rank:
            return None
        config, self._usable = self._config, UsableRows(self._order)
        keeps = bool(config.algorithm.dynamic_sample)
        return load_source(config.data, self._usable, config.run.seed, keeps, self._key)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions get."""
        return self._order.columns

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts."""
        self._fill(n)
        drawn = super().next(n)
        for prompt_id in self._queue[:n]:
            if prompt_id in self._new:
                self._drawn[prompt_id] = self._new.pop(prompt_id)
        del self._queue[:n]
        return drawn

    def peek(self, n: int) -> list[Prompt]:
        """Return the prompts that `next(n)` would draw now, without drawing. They will be drawn whatever is learned."""
        self._fill(n)
        return super().peek(n)

    def tell(self, drawn: StepSamples, num_generations: int) -> dict[str, float]:
        """Give the source all groups that the step has drawn. Returns its metrics on rank 0."""
        if not self._learns:
            return {}
        groups, progress = self._groups(drawn, num_generations), self._progress
        return self._call("learn", lambda source: _metrics(source.learn(groups, progress))) or {}

    def kept(self, drawn: StepSamples, num_generations: int) -> np.ndarray:
        """Return the indices of the groups that the source keeps."""
        groups = self._groups(drawn, num_generations)
        own = self._call("keep", lambda source: [bool(source.keep(group)) for group in groups])
        kept = torch.tensor(own or [False] * (len(drawn) // num_generations))
        return np.flatnonzero(self._layout.all_reduce(kept.int(), "max").numpy())

    def store(self, state: TrainState) -> None:
        """Write the cursor and the source's state into the run's state, after each finished step."""
        super().store(state)
        self._step, self._drawn = state.step, {}
        # no NoRollouts, after which the run saves: the step is trained, and its state is incomplete
        state.source = self._call("state_dict", self._packed, EngineError) or ""

    def restore(self, state: TrainState) -> None:
        """Continue from the state of a checkpoint; a checkpoint without a data source leaves this one as it begins.
        Raises ConfigError for other data, and EngineError if the source raises."""
        self.cursor, self._step = state.cursor, state.step
        if not state.source:
            return
        saved = _unpacked(state.source)
        if saved["rows"] != [len(self.rows), self.first_new]:
            raise ConfigError(
                f"{self._key}: data.train has {len(self.rows)} usable rows, and had {saved['rows'][0]} when the "
                "checkpoint was written; continue with the same data, or start a new run"
            )
        self._queue, self._new = saved["queue"], saved["new"]
        self._call("load_state_dict", lambda source: source.load_state_dict(saved["source"]), EngineError)

    def prompt(self, row: int, position: int | None = None) -> Prompt:
        """Return the prompt of a row of the data set, or of a new one."""
        if row in self._new:
            return self._order.new_prompt(self._new[row], row, position)
        return self._order.prompt(row, position)

    def _upcoming(self) -> Iterator[tuple[int, int, int]]:
        return iter([(place, row, 0) for place, row in enumerate(self._queue, self.cursor)])

    @property
    def _progress(self) -> Progress:
        return Progress(self._step, self._config.run.num_steps)

    def _fill(self, n: int) -> None:
        """Ask the source until the queue has `n` prompts."""
        if (missing := n - len(self._queue)) <= 0:
            return
        rows = self._call("next", lambda source: self._ask(source, missing)) or []
        own = torch.tensor([NEW if isinstance(row, dict) else row for row in rows] or [NEW - 1] * missing)
        numbers = self._layout.all_reduce(own, "max").tolist()
        new: list[dict[str, Any]] = [row for row in rows if isinstance(row, dict)]
        if NEW in numbers:
            new = self._layout.broadcast_object(new)
        contents = iter(new)
        for place, number in enumerate(numbers, self.cursor + len(self._queue)):
            if number == NEW:
                number = self.first_new + place
                self._new[number] = next(contents)
            self._queue.append(number)

    def _ask(self, source: DataSource, missing: int) -> list[Row]:
        """Return `missing` usable rows of the source. It replaces new rows that are too long, and rows that are bad and
        skipped."""
        rows: list[Row] = []
        for _ in range(ATTEMPTS):
            wanted = missing - len(rows)
            returned = list(source.next(wanted, self._progress))
            if len(returned) != wanted:
                raise SourceFailed(f"returned {len(returned)} of {wanted} rows; return as many as it is asked for")
            rows += [row for row in map(self._checked, returned) if row is not None]
            if len(rows) == missing:
                return rows
        raise SourceFailed(
            f"returned only rows that are bad or longer than rollout.max_prompt_length, {ATTEMPTS} times"
        )

    def _checked(self, row: Any) -> Row | None:
        """Return the row as int or dict; None for a row that is left out."""
        assert isinstance(self._order, PromptSource), "rank 0 reads the data set"
        if isinstance(row, Mapping):
            new = copy.deepcopy(storable(dict(row)))
            return new if self._order.accepts(new, self.first_new) else None
        number = int(row) if isinstance(row, int | np.integer) and not isinstance(row, bool) else None
        if number is None:
            raise SourceFailed(f"returned {row!r:.100}; return numbers of rows, or dicts with the columns of new rows")
        if number not in self._usable:
            raise SourceFailed(f"returned row {number}, but `rows` has no such row, only {len(self.rows)} others")
        if self._config.data.images and number not in self._decoded:
            if not self._order.accepts(self._order.row(number), number):
                return None
            self._decoded.add(number)
        return number

    def _groups(self, drawn: StepSamples, size: int) -> list[Group]:
        """The groups of the samples, on rank 0; [] on other ranks."""
        if self._source is None:
            return []
        facts, written, cut = drawn.facts, drawn.written.tolist(), drawn.has(TRUNCATED).tolist()
        known = [[None if math.isnan(value) else value for value in column] for column in facts["rewards"].T.tolist()]
        totals = [None if math.isnan(value) else value for value in facts["reward"].tolist()]
        starts = range(0, len(drawn), size)
        parts = [(drawn.prompts[start].prompt_id - self._first_id, slice(start, start + size)) for start in starts]
        return [
            Group(
                self._drawn.get(prompt_id, prompt_id),
                prompt_id,
                totals[part],
                {name: column[part] for name, column in zip(drawn.columns.rewards, known, strict=True)},
                written[part],
                cut[part],
            )
            for prompt_id, part in parts
        ]

    def _call[T](
        self, name: str, action: Callable[[DataSource], T], raised: type[EngineError] = NoRollouts
    ) -> T | None:
        """Run `action` with the source on rank 0 and return its result there, None on other ranks. Raises `raised` on
        every rank when it fails."""

        def run() -> T | None:
            if self._source is None:
                return None
            try:
                return action(self._source)
            except SourceFailed as error:
                why = str(error)
            except Exception as error:
                why = f"raised {user_code.described(error)}"
            raise SourceFailed(f"{self._key}: `{self._config.data.source}`: {name} {why}")

        try:
            return run_own_and_agree(self._layout, run)
        except (SourceFailed, RankError) as error:
            raise raised(str(error)) from error

    def _packed(self, source: DataSource) -> str:
        """Return the queue and the state of the source as text."""
        saved = {
            **{"queue": self._queue, "new": self._new, "rows": [len(self.rows), self.first_new]},
            "source": source.state_dict(),
        }
        file = io.BytesIO()
        torch.save(saved, file)
        text = base64.b64encode(file.getvalue()).decode()
        try:
            _unpacked(text)
        except Exception as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise SourceFailed(
                f"returned {found[1] if found else 'an object'}, which a checkpoint cannot hold; return tensors, "
                "numbers, texts, and lists, tuples, sets and dicts of them"
            ) from error
        return text


def _unpacked(text: str) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return saved


def _metrics(returned: Mapping[str, float] | None) -> dict[str, float]:
    return {f"source/{name}": float(value) for name, value in (returned or {}).items()}


class UsableRows(Mapping[int, dict[str, Any]]):
    """The columns of each usable row of a data set by its number."""

    def __init__(self, order: PromptSource):
        self._order = order
        self._usable = order.rows if isinstance(order.rows, range) else dict.fromkeys(order.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number not in self._usable:
            raise KeyError(f"row {number}")
        return self._order.row(number)

    def __iter__(self) -> Iterator[int]:
        return iter(self._usable)

    def __len__(self) -> int:
        return len(self._usable)
