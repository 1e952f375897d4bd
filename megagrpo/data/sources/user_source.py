"""Defines what a user's data source (`data.source`) looks like, and loads it. docs/data_source.md explains it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megagrpo.config import DataSection
from megagrpo.platform.process import user_code

Row = int | dict[str, Any]  # the number of a row of the data set, or the columns of a new one


@dataclass(frozen=True)
class Progress:
    """How far training is."""

    step: int  # finished steps
    max_steps: int


@dataclass(frozen=True)
class Group:
    """The finished responses to one prompt. Lists have one element for each response, in order."""

    row: Row  # as `next` returned it
    prompt_id: int  # of completions.jsonl: the row's number; of a new row a number above those of the data set
    rewards: list[float | None]  # weighted sums; None where no function could score
    by_function: dict[str, list[float | None]]  # by name, before weights
    lengths: list[int]  # tokens that the policy wrote
    truncated: list[bool]  # whether the response reached its length limit

    @property
    def mean(self) -> float | None:
        """The mean of the known rewards; None without one."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None


class DataSource(Protocol):
    """Chooses the next prompts of a run. The class of the user needs no base class.

    `rows` maps the number of each usable row of `data.train` to its columns, `seed` is `run.seed`, and `options` are
    `data.source_args`. `learn` and `keep` may be absent.
    """

    def __init__(self, rows: Mapping[int, dict[str, Any]], seed: int, **options: Any) -> None: ...

    def next(self, count: int, progress: Progress) -> Sequence[Row]:
        """Return the next `count` rows: numbers of `rows`, or dicts with the columns of new rows."""

    def learn(self, groups: Sequence[Group], progress: Progress) -> Mapping[str, float] | None:
        """Take all groups that a step has drawn, in order. Returned numbers become metrics `source/NAME`."""

    def keep(self, group: Group) -> bool:
        """Whether a step trains on the group, with `algorithm.dynamic_sample`. Other groups are replaced."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: tensors, numbers, texts, and lists, tuples, sets and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


_ARGUMENTS: dict[str, tuple[object, ...]] = {
    **{"next": (1, None), "state_dict": (), "load_state_dict": ({},)},
    **{"learn": ([], None), "keep": (None,)},
}
_REQUIRED = ("next", "state_dict", "load_state_dict")


def load_source(
    data: DataSection, rows: Mapping[int, dict[str, Any]], seed: int, keeps: bool, key: str = "data.source"
) -> DataSource | None:
    """Return an instance of the class that `data.source` names; None without one. `keeps`: whether `keep` is asked.
    `key` is that of the class, which a task may have.

    Raises ValueError with the rule that the class breaks.
    """
    if data.source is None:
        return None
    said = f"{key}: `{data.source}`"
    try:
        made: Any = user_code.load_named(data.source)
    except ValueError as error:
        raise ValueError(f"{said} {error}") from error
    if not isinstance(made, type):
        raise ValueError(f"{said} is not a class; name a class with the method next: docs/data_source.md")
    methods = {name: getattr(made, name) for name in _ARGUMENTS if callable(getattr(made, name, None))}
    if missing := [name for name in _REQUIRED if name not in methods]:
        raise ValueError(f"{said} does not define {', '.join(missing)}; add the method: docs/data_source.md")
    if "keep" in methods and not keeps:
        raise ValueError(
            f"{said} defines keep, which a run calls only with algorithm.dynamic_sample: true; set it, or remove keep"
        )
    try:
        inspect.signature(made).bind(rows, seed, **data.source_args)
    except TypeError as error:
        raise ValueError(f"{said} cannot be constructed: {error}; correct __init__ or data.source_args") from None
    for name, method in methods.items():
        try:
            inspect.signature(method).bind(None, *_ARGUMENTS[name])
        except TypeError as error:
            raise ValueError(f"{said} cannot be called: {name}: {error}; see docs/data_source.md") from None
    try:
        source: DataSource = made(rows, seed, **data.source_args)
    except Exception as error:
        raise ValueError(f"{said} cannot be constructed: {user_code.described(error)}; correct the class") from error
    return source
