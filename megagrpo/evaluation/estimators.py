"""pass@k and maj@k of n responses to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that at least one of k responses, drawn from n of which `passed` pass, passes: 1 - C(n - passed, k) / C(n, k).

    Unbiased in what a fresh draw of k would give (Chen et al. 2021, arXiv 2107.03374, eq. 1). ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {n} responses of which {passed} pass: k must be from 1 to {n}")
    return 1 - comb(n - passed, k) / comb(n, k)


def majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> bool:
    """Whether the answer that most responses give passes (Wang et al. 2022, arXiv 2203.11171).

    A response without an answer does not vote. Of answers with as many votes the one that came first wins; it passes when the first
    response that gives it does.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    return passed[list(answers).index(winner)]


def steps_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n: the k of pass@k."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
