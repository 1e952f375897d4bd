"""Runs an action on some ranks: it succeeds or fails on all ranks, and no rank hangs waiting for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from megagrpo.platform.parallel.layout import Layout


class RankError(RuntimeError):
    """An action failed on another rank; the text names the rank and its error."""


@overload
def run_and_agree[T](layout: Layout, action: Callable[[], T], here: Literal[True] = True) -> list[T]: ...
@overload
def run_and_agree[T](layout: Layout, action: Callable[[], T], here: bool) -> list[T | None]: ...
def run_and_agree[T](layout: Layout, action: Callable[[], T], here: bool = True) -> Sequence[T | None]:
    """Run `action` where `here` is true; return all results in rank order on every rank, None if not run. Collective.

    If it raises on any rank, every rank raises: the failing rank its own error, the others a RankError that names the
    failing rank.
    Results must be picklable.
    """
    result, failure = _attempt(action, here)
    return [value for value, _ in _agree(layout, result, failure)]


def on_first_rank[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_and_agree`, but run `action` on rank 0 alone, and return its result on every rank."""
    result, failure = _attempt(action, layout.world_rank == 0)
    first: T = _agree(layout, result, failure)[0][0]
    return first


@overload
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: Literal[True] = True) -> T: ...
@overload
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: bool) -> T | None: ...
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: bool = True) -> T | None:
    """Like `run_and_agree`, but return only this rank's own result, which need not be picklable."""
    result, failure = _attempt(action, here)
    _agree(layout, None, failure)
    return result


def _attempt[T](action: Callable[[], T], here: bool) -> tuple[T | None, Exception | None]:
    if not here:
        return None, None
    try:
        return action(), None
    except Exception as error:
        return None, error


def _agree(layout: Layout, result: Any, failure: Exception | None) -> list[tuple[Any, str | None]]:
    described = None if failure is None else f"rank {layout.world_rank}: {type(failure).__name__}: {failure}"
    everyone = layout.all_gather_objects((result, described))
    if failure is not None:
        raise failure
    if (first := next((text for _, text in everyone if text is not None), None)) is not None:
        raise RankError(first)
    return everyone
