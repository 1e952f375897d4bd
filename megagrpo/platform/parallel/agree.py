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
    return _run(layout, action, here, shares=True)[1]


def on_first_rank[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_and_agree`, but run `action` on rank 0 alone, and return its result on every rank."""
    first: Any = run_and_agree(layout, action, layout.world_rank == 0)[0]
    return first


@overload
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: Literal[True] = True) -> T: ...
@overload
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: bool) -> T | None: ...
def run_own_and_agree[T](layout: Layout, action: Callable[[], T], here: bool = True) -> T | None:
    """Like `run_and_agree`, but return only this rank's own result, which need not be picklable."""
    return _run(layout, action, here, shares=False)[0]


def _run[T](layout: Layout, action: Callable[[], T], here: bool, shares: bool) -> tuple[T | None, list[T | None]]:
    """Return this rank's result and, if it `shares` results, those of all ranks."""
    result, failure, described = None, None, None
    try:
        result = action() if here else None
    except Exception as error:
        failure, described = error, f"rank {layout.world_rank}: {type(error).__name__}: {error}"
    everyone = layout.all_gather_objects((result if shares else None, described))
    if failure is not None:
        raise failure
    if (first := next((text for _, text in everyone if text is not None), None)) is not None:
        raise RankError(first)
    return result, [value for value, _ in everyone]
