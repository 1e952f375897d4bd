"""The policy term of the user's own loss, for the audit. It has no second formula, so the audit runs the user's
function again: in float64, one response at a time. That checks everything around the formula, and not the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from megagrpo.algorithms.custom_loss import load_policy_term
from megagrpo.algorithms.policy_losses import Tokens
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection, ConfigError, ProblemError


def custom_term(
    logprobs: Tensor, old: Tensor, ratio: Tensor, advantage: float, weights: Tensor | None, algorithm: AlgorithmSection
) -> Tensor:
    """Return [Lr] float64: the user's term of one response, of [Lr] float64 rows over its tokens."""
    length = logprobs.numel()
    sequences = Sequences.of(torch.tensor([0, length]), torch.ones(length, dtype=torch.bool))
    tokens = Tokens(logprobs, old, ratio, torch.full_like(old, advantage), sequences, weights)
    return load_policy_term(algorithm)(tokens, algorithm)


def check_custom_loss(algorithm: AlgorithmSection) -> None:
    """Raise ConfigError when the run's loss is the user's own and cannot be loaded any longer."""
    if not algorithm.loss.custom:
        return
    try:
        load_policy_term(algorithm)
    except ProblemError as error:
        raise ConfigError(f"{error}; the audit runs the loss of the run again: put its file back there") from error


def note(algorithm: AlgorithmSection) -> str:
    """Return what the audit says of a loss of the user's own; empty for others."""
    return f"{algorithm.loss_type} run again in float64; its formula is not checked" if algorithm.loss.custom else ""
