"""Runs an action on some ranks: it succeeds or fails on all ranks, and no rank hangs waiting for a failed one.

Agreement costs one small all-reduce. The text of an error travels only when an action failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megagrpo.platform.parallel.layout import Layout


class RankError(RuntimeError):
    """An action failed on another rank; the text names the rank and its error. `problem` is that error's own text."""

    def __init__(self, rank: int, kind: str, problem: str) -> None:
        super().__init__(rank, kind, problem)
        self.problem = problem

    def __str__(self) -> str:
        return "rank {}: {}: {}".format(*self.args)


def run_and_agree[T](layout: Layout, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank and return all results in rank order, on every rank. Collective.

    If it raises on any rank, every rank raises: the failing rank its own error, the others a RankError that names the
    failing rank.
    Results must be picklable. Every rank receives all of them: for the start and the end of a run, not for its steps.
    """
    return layout.all_gather_objects(run_own_and_agree(layout, action))


def on_first_rank[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_own_and_agree`, but run `action` on rank 0 alone, and broadcast its result unless that is None."""
    first: Any
    first, has_result = _run(layout, action if layout.world_rank == 0 else lambda: None)
    return layout.broadcast_object(first) if has_result else first


def run_own_and_agree[T](layout: Layout, action: Callable[[], T]) -> T:
    """Like `run_and_agree`, but return only this rank's own result, which need not be picklable."""
    return _run(layout, action)[0]


def _run[T](layout: Layout, action: Callable[[], T]) -> tuple[T, bool]:
    """Return this rank's result, and whether the result of any rank is not None."""
    result: Any = None
    failure = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failed = 0 if failure is None else layout.world_size - layout.world_rank  # the first failed rank has the largest
    failed, has_result = layout.all_reduce(torch.tensor([failed, int(result is not None)]), "max").tolist()
    if failed:
        rank = layout.world_size - failed
        texts = layout.broadcast_object((type(failure).__name__, str(failure)), rank)
        raise failure or RankError(rank, *texts)
    return result, bool(has_result)
