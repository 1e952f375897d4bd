"""Estimators of pass@k and maj@k from n responses to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passes, when k are drawn from n of which `passed` pass.

    The formula is 1 - C(n - passed, k) / C(n, k), an unbiased estimate for k fresh responses (Chen et al. 2021, arXiv
    2107.03374, eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= passed <= n.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} of {n} responses of which {passed} pass: k must be from 1 to {n}")
    return 1 - comb(n - passed, k) / comb(n, k)


def majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> bool:
    """Whether the most frequent answer passes (Wang et al. 2022, arXiv 2203.11171).

    A response without an answer does not vote. With equal votes the answer that came first wins. The winner passes when
    the first response with that answer passes.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    (winner, _), *_ = votes.most_common(1)
    return passed[list(answers).index(winner)]


def steps_to(n: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... below n, and n."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]
