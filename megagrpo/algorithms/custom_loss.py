"""Policy terms of users: `algorithm.loss_type: path/file.py:name`, imported and tried on a few tokens before a run."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import Tensor

from megagrpo.algorithms.policy_losses import PolicyTerm, Tokens
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection, Problem, ProblemError
from megagrpo.platform.process import user_code

LOSS_TYPE_KEY = "algorithm.loss_type"
LOSS_SIGNATURE = "a loss takes (tokens, algorithm) and returns one number per token, [T] (docs/losses.md)"


def load_policy_term(algorithm: AlgorithmSection) -> PolicyTerm:
    """Return the function of `algorithm.loss_type`. Raises ProblemError when its import or trial on tokens fails."""
    name = algorithm.loss_type
    term = _imported(name)
    if fault := _fault(term, algorithm):
        raise ProblemError(Problem((LOSS_TYPE_KEY,), f"`{name}` {fault}"))
    return term


@functools.cache
def _imported(name: str) -> PolicyTerm:
    try:
        return user_code.load_named(name)
    except ValueError as error:
        raise ProblemError(Problem((LOSS_TYPE_KEY,), f"`{name}` {error}")) from error


def _fault(term: PolicyTerm, algorithm: AlgorithmSection) -> str | None:
    """Return the term's fault or None: its parameters, an exception, or its result's type, shape, values, gradient."""
    tokens = _few_tokens()
    try:
        inspect.signature(term).bind(tokens, algorithm)
    except TypeError as error:
        return f"cannot be called as a loss: {error}; {LOSS_SIGNATURE}"
    except ValueError:
        pass  # a builtin without a signature
    try:
        result: object = term(tokens, algorithm)  # of the user's function, whatever its types say
    except Exception as error:
        return f"raised {user_code.described(error)}; {LOSS_SIGNATURE}"
    shape = tokens.logprobs.shape
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__}, not a tensor; {LOSS_SIGNATURE}"
    if result.shape != shape or not result.is_floating_point():
        return f"returned {result.dtype} {list(result.shape)} for {shape.numel()} tokens; {LOSS_SIGNATURE}"
    counted = tokens.sequences.mask
    if not result[counted].isfinite().all():
        return (
            "returned NaN or infinity for log-probs between -3 and 0, ratios near 1 and advantages of 0.7 and -0.7; "
            "correct the formula"
        )
    if not result.requires_grad:
        return "has no gradient in tokens.logprobs; compute it from tokens.logprobs or tokens.ratio without detach"
    (gradient,) = torch.autograd.grad(result[counted].sum(), tokens.logprobs)
    if not gradient.isfinite().all():
        return "has a gradient of NaN or infinity for log-probs between -3 and 0 and ratios near 1; correct the formula"
    return None


def _few_tokens() -> Tokens:
    """Two samples of four tokens, one with each sign of the advantage, on the CPU; each one's first token is masked."""
    logprobs = torch.linspace(-2.5, -0.5, 8).requires_grad_()
    old = logprobs.detach() + 0.1 * torch.sin(3 * torch.arange(8.0))
    mask = torch.tensor([False, True, True, True] * 2)
    sequences = Sequences.of(torch.tensor([0, 4, 8], dtype=torch.int32), mask)
    advantages = torch.tensor([0.7] * 4 + [-0.7] * 4)
    return Tokens(logprobs, old, (logprobs - old).exp(), advantages, sequences)
