"""Estimators of the KL divergence from the policy to the reference (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from torch import Tensor


def k3(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(ref - policy) - (ref - policy) - 1 per token: unbiased for tokens of the policy, never negative. Same shape as its inputs."""
    log_ratio = ref_logprobs - policy_logprobs
    return log_ratio.exp() - log_ratio - 1
