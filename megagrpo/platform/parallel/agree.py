"""Runs an action on some ranks: it succeeds or fails on all ranks, and no rank hangs waiting for a failed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megagrpo.platform.parallel.layout import Layout


class RankError(RuntimeError):
    """An action failed on another rank; the text names the rank and its error."""


def run_and_agree[T](layout: Layout, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return all results in rank order, on every rank. Collective.

    If it raises on any rank, every rank raises: the failing rank its own error, the others a RankError that names the
    failing rank.
    Results must be picklable.
    """
    return _run(layout, action, shares=True)[1]


def on_first_rank[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_and_agree`, but run `action` on rank 0 alone, and return its result on every rank."""
    first: Any = run_and_agree(layout, lambda: action() if layout.world_rank == 0 else None)[0]
    return first


def run_own_and_agree[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_and_agree`, but return only this rank's own result, which need not be picklable."""
    return _run(layout, action, shares=False)[0]


def _run[T](layout: Layout, action: Callable[[], T], shares: bool) -> tuple[T, list[T]]:
    """Return this rank's result and, if it `shares` results, those of all ranks."""
    result: Any = None
    failure, described = None, None
    try:
        result = action()
    except Exception as error:
        failure, described = error, f"rank {layout.world_rank}: {type(error).__name__}: {error}"
    everyone = layout.all_gather_objects((result if shares else None, described))
    if failure is not None:
        raise failure
    if (first := next((text for _, text in everyone if text is not None), None)) is not None:
        raise RankError(first)
    return result, [value for value, _ in everyone]
