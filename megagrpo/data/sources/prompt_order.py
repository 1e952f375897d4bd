"""Draws rows of a data set in an order that one integer, the cursor, resumes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count, islice
from typing import Any, overload

import numpy as np

from megagrpo.config import ConfigError, DataSection
from megagrpo.data.sources.bad_rows import BadRows
from megagrpo.data.sources.data_identity import DataIdentity
from megagrpo.train_types import TrainState
from megagrpo.types import Prompt

Origin = tuple[str, int, BadRows]  # of a prompt: config key of its data set, row, bad rows of the set
MOST_SORTED = 1 << 14  # rows of an epoch


class PromptOrder:
    """An endless stream of prompts from one data set, the same on every rank.

    `next(n)` draws prompts. The whole state is `cursor`, the number of positions drawn or skipped since the start, and
    the history of `curriculum`: set both to resume. Every epoch contains each prompt once, in the order of
    blake2b("seed/epoch/prompt_id") with `data.shuffle`, else in the order of the data set. So the order depends only on
    the seed and the epoch, and dropping a prompt does not move the others. More than MOST_SORTED rows are not sorted:
    a `RowPermutation` computes their order. Prompts that rest are skipped. After `join`
    an epoch may have been begun with fewer rows: `joins` lists (cursor, epoch, rows before) of each call.

    `rows` are the rows of the data set that are used. The prompts here have a `prompt_id` and a `position`, but no
    content: a rank that neither generates nor scores reads no data set. `PromptSource` reads it.
    """

    def __init__(self, rows: Sequence[int], data: DataSection, seed: int):
        self.rows, self._data, self._seed = rows, data, seed
        self.bad = BadRows(data.bad_rows == "skip")
        self._left_out: set[int] = set()
        self.warnings: list[str] = []
        self._orders: dict[int, Sequence[int]] = {}  # epoch -> rows in order, for the last epochs in use
        self._peeked: dict[int, Prompt] = {}  # by position, from the cursor on
        self.curriculum = Curriculum(data)
        self.response_lengths = ResponseLengths()
        self._drawn_in: dict[int, int] = {}  # prompt_id -> epoch, for prompts drawn since the last `learn`
        self.identity: DataIdentity | None = None  # of the data set, where it is read
        self._joins: list[tuple[int, int, int]] = []
        self._joined: tuple[int, int, Sequence[int]] = (0, -1, ())  # the last join's position, epoch and rest of it
        self.cursor = 0

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        return len(self.rows)

    @property
    def cursor(self) -> int:
        """Number of positions drawn or skipped since the start, over all epochs."""
        return self._cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"prompt cursor {value} is negative; it counts drawn prompts")
        self._cursor = value

    @property
    def columns(self) -> list[str]:
        """Names of the columns that reward functions get; empty without content."""
        return []

    def next(self, n: int) -> list[Prompt]:
        """Draw the next `n` prompts; they may span two epochs. `prompt_id` is the row in the data set."""
        drawn: list[Prompt] = []
        for position, row, epoch in islice(self._upcoming(), n):
            self._cursor = position + 1
            self._drawn_in[row] = epoch
            drawn.append(self._peeked.pop(position) if position in self._peeked else self.prompt(row, position))
        self._peeked = {position: prompt for position, prompt in self._peeked.items() if position >= self._cursor}
        return drawn

    def peek(self, n: int) -> list[Prompt]:
        """Return the prompts that `next(n)` would draw now, without drawing. A later `learn` may let some rest."""
        upcoming = list(islice(self._upcoming(), n))
        self._peeked |= {
            position: self.prompt(row, position) for position, row, _ in upcoming if position not in self._peeked
        }
        return [self._peeked[position] for position, _, _ in upcoming]

    def origin(self, prompt_id: int) -> Origin:
        """Return the config key of a prompt's data set, its row there, and the bad rows of the set."""
        return "data.train", prompt_id, self.bad

    def leave_out(self, rows: Collection[int]) -> None:
        """Never draw these rows again; positions stay. Raises ValueError if no row is left."""
        self._left_out |= set(rows)
        if len(self._left_out) == len(self.rows):
            raise ValueError("data.train: no row is usable; correct the rows")

    def learn(self, pass_rates: Mapping[int, float]) -> dict[str, float]:
        """Give the curriculum the pass rates of the prompts drawn since the last call. Returns its metrics."""
        self.curriculum.learn(pass_rates, self._drawn_in)
        self._drawn_in = {}
        return self.curriculum.metrics(self._epoch_at(self._cursor)[0])

    def store(self, state: TrainState) -> None:
        """Write the cursor and the curriculum's history into the run's state."""
        state.cursor, state.pass_rates = self.cursor, self.curriculum.history
        state.data = {"joins": self._joins, "epoch": self._epoch_at(self._cursor)[0]}
        if self.identity is not None:
            state.data |= self.identity.state()

    def restore(self, state: TrainState) -> None:
        """Continue from the state of a checkpoint. Raises ConfigError for a state that needs a data source."""
        if state.source:
            raise ConfigError("data.source: the checkpoint has the state of a data source; name its class again")
        self.cursor, self.curriculum.history = state.cursor, state.pass_rates
        self._joins = [(cursor, epoch, kept) for cursor, epoch, kept in state.data.get("joins", ())]
        self._replay_joins()

    def parts(self, state: TrainState) -> list[tuple[str, PromptOrder, dict[str, Any]]]:
        """Return (config key, order, what a state says about its data) of each data set: of this one."""
        return [("data.train", self, state.data)]

    def join(self, state: TrainState, kept: int) -> None:
        """Draw from the restored cursor on rows that the data set of the checkpoint lacked: all after its first `kept`.

        The epoch in progress continues with them, in its order, and draws no prompt twice. With 0, for other data, the
        epoch begins again and the curriculum's history ends.
        """
        if not kept:
            self._joins, self.curriculum.history = [], []
        self._joins.append((state.cursor, state.data.get("epoch", 0), kept))
        self._replay_joins()

    def _replay_joins(self) -> None:
        self._joined, self._orders, self._peeked = (0, -1, ()), {}, {}
        limits = [*(kept for _, _, kept in self._joins[1:]), math.inf]
        for (cursor, epoch, kept), limit in zip(self._joins, limits, strict=False):
            old = [row for row in self.rows if row < kept]
            begin, begun, rest = self._joined
            number = cursor - begin if begun == epoch else self._epoch_at(cursor, len(old))[1]
            left = (rest if begun == epoch else self._epoch_order(epoch, old))[number:] if kept else ()
            added = [row for row in self.rows if kept <= row < limit]
            self._joined = cursor, epoch, self._epoch_order(epoch, [*left, *added])

    def new_prompt(self, values: dict[str, Any], prompt_id: int, position: int | None = None) -> Prompt:
        """Return the prompt of a row that is not in the data set, with these columns; here without content."""
        return self.prompt(prompt_id, position)

    def all(self) -> list[Prompt]:
        """Return every prompt once, in the order of the data set. The cursor does not move."""
        return [self.prompt(row) for row in self.rows]

    def prompt(self, row: int, position: int | None = None) -> Prompt:
        """Return the prompt of a row; `position` is its index in the stream of prompts."""
        return Prompt(row, (), "", position=position)

    def _upcoming(self) -> Iterator[tuple[int, int, int]]:
        """Yield (position in the stream, row, epoch) of the prompts from the cursor on that neither rest nor are left
        out. Endless, because every rest ends."""
        for position in count(self._cursor):
            row, epoch = self._row_at(position)
            if row not in self._left_out and not self.curriculum.rests(row, epoch):
                yield position, row, epoch

    def _row_at(self, position: int) -> tuple[int, int]:
        """Return the row at a position of the stream, and its epoch."""
        epoch, number = self._epoch_at(position)
        if epoch == self._joined[1]:
            return self._joined[2][number], epoch
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1} | {
                epoch: self._epoch_order(epoch, self.rows)
            }
        return self._orders[epoch][number], epoch

    def _epoch_at(self, position: int, length: int = 0) -> tuple[int, int]:
        """Return the epoch of a position, and the position's number in the epoch, or in the rest that `join` left of
        it. Epochs have `length` prompts, by default all."""
        begin, epoch, rest = self._joined
        if (number := position - begin) < len(rest):
            return epoch, number
        epochs, number = divmod(number - len(rest), length or len(self))
        return epoch + 1 + epochs, number

    def _epoch_order(self, epoch: int, rows: Sequence[int]) -> Sequence[int]:
        if not self._data.shuffle:
            return rows
        if len(rows) > MOST_SORTED:
            return RowPermutation(rows, f"{self._seed}/{epoch}")
        return sorted(rows, key=lambda row: blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=16).digest())


class ResponseLengths:
    """The mean length of the responses to each prompt of a data set at its last visit: 4 bytes a prompt.

    Every rank learns the same lengths, so a prompt has its expected length on whichever rank generates it. Checkpoints
    leave them out, because they change no result: a resumed run learns them again as it visits prompts.
    """

    def __init__(self) -> None:
        self._means = np.zeros(0, np.float32)

    def learn(self, prompt_ids: Sequence[int], lengths: Sequence[int]) -> None:
        """Store the lengths of responses in tokens; `prompt_ids` has the prompt of each response."""
        ids, of_response = np.unique(prompt_ids, return_inverse=True)
        if missing := max(0, int(ids[-1]) + 1 - self._means.size):
            self._means = np.pad(self._means, (0, missing))
        self._means[ids] = np.bincount(of_response, lengths) / np.bincount(of_response)

    def expected(self, prompt_id: int) -> float:
        """Return the mean length at the prompt's last visit; 0 if it had none."""
        return float(self._means[prompt_id]) if prompt_id < self._means.size else 0.0


ROUNDS = 6


class RowPermutation(Sequence[int]):
    """`rows` in an order that depends on `key` alone; each element is computed when it is asked for.

    A Feistel network permutes the numbers of 2 x `half` bits (Luby and Rackoff 1988). A number beyond the rows is
    permuted again, until it is one of theirs: at most four times on average.

    >>> sorted(RowPermutation(range(10), "seed 0")) == list(range(10))
    True
    """

    def __init__(self, rows: Sequence[int], key: str):
        self._rows, self._key = rows, key
        self._half = max(1, (max(1, len(rows) - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        while (place := self._permuted(place)) >= len(self):
            pass
        return self._rows[place]

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for i in range(ROUNDS):
            digest = blake2b(f"{self._key}/{i}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half | right


class Curriculum:
    """Keeps the pass rates of a data set's prompts, and derives the prompts that rest.

    A prompt whose last pass rate is outside the interval `data.curriculum` rests for `curriculum_rest` epochs
    and is then drawn again. So prompts inside are drawn more often. A prompt without a pass rate does not rest. Nothing
    is random: the same history rests the same prompts. With an empty `data.curriculum` no prompt rests.
    """

    def __init__(self, section: DataSection):
        self._section = section
        self._history: dict[int, tuple[float, int]] = {}  # prompt_id -> (last pass rate, epoch of that draw)

    @property
    def history(self) -> list[tuple[int, float, int]]:
        """The whole state: (prompt_id, last pass rate, epoch of that draw) for each prompt with a pass rate."""
        return [(prompt_id, rate, epoch) for prompt_id, (rate, epoch) in self._history.items()]

    @history.setter
    def history(self, value: Iterable[Sequence[float]]) -> None:
        self._history = {int(prompt_id): (rate, int(epoch)) for prompt_id, rate, epoch in value}

    def rests(self, prompt_id: int, epoch: int) -> bool:
        """Whether the prompt rests in this epoch."""
        if not self._section.curriculum or prompt_id not in self._history:
            return False
        rate, drawn = self._history[prompt_id]
        low, high = self._section.curriculum
        return not low <= rate <= high and epoch - drawn <= self._section.curriculum_rest

    def learn(self, pass_rates: Mapping[int, float], epochs: Mapping[int, int]) -> None:
        """Store the pass rates of drawn prompts and the epochs in which they were drawn, both by prompt_id."""
        if self._section.curriculum:
            self._history |= {prompt_id: (rate, epochs[prompt_id]) for prompt_id, rate in pass_rates.items()}

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return how many prompts rest in this epoch and the mean of the last pass rates; empty without pass rates."""
        if not self._history:
            return {}
        resting = sum(self.rests(prompt_id, epoch) for prompt_id in self._history)
        mean = sum(rate for rate, _ in self._history.values()) / len(self._history)
        return {"curriculum/resting": float(resting), "curriculum/pass_rate": mean}
