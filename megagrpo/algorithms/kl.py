"""Estimators of KL(policy || reference) = sum_v policy(v) log(policy(v) / reference(v)) from sampled tokens' log-probs.

k1, k2 and k3 are those of Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html);
`absolute` and `low_var` are verl's `abs` and `low_var_kl` (`verl/trainer/ppo/core_algos.py`). All are elementwise: two
float tensors [T], log-probs in nats with the gradient in the first, give a tensor [T] in nats. They raise nothing; a
token of probability 0 gives infinity.

Value and gradient are two questions. An estimator's value may average to the KL while its gradient averages to that of
something else, because the derivative is taken at a token that was sampled already. Each docstring says both, for
tokens sampled from the policy; what is averaged over is the next token given those before it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def k1(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[T]: log(policy / ref): averages to the KL, but is negative half of the time. Its gradient averages to 0: as a
    penalty it pulls nowhere unless it is importance-weighted."""
    return policy_logprobs - ref_logprobs


def k2(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[T]: log(policy / ref)^2 / 2: never negative, third-order bias. Its gradient averages to KL(policy || ref)'s."""
    return (policy_logprobs - ref_logprobs).square() / 2


def k3(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[T]: ref / policy - 1 - log(ref / policy): averages to the KL and is never negative. Its gradient averages to
    that of the other direction, KL(ref || policy)."""
    log_ratio = ref_logprobs - policy_logprobs
    return log_ratio.exp() - log_ratio - 1


def absolute(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[T]: |log(policy / ref)|: a distance, no KL estimate. Its mean gradient is that of sum_v |policy(v) - ref(v)|."""
    return (policy_logprobs - ref_logprobs).abs()


def low_var(policy_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[T]: k3 with its log-ratio clamped to +-20 and its value to at most 10. Below that it is k3; above, its gradient
    is 0: a token that the policy has all but forgotten is not pulled back."""
    log_ratio = (ref_logprobs - policy_logprobs).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=10)


def importance_weighted(kl: Tensor, ratio: Tensor) -> Tensor:
    """kl * ratio, with gradient through both; ratio = policy / the sampled distribution, 1 on policy. All of one shape.

    Then the gradient averages to that of the estimator's own average: of KL(policy || ref) for k1 and k3, also when the
    policy has moved on from the tokens' distribution (DeepSeek-V3.2, 2025, eq. 7; TRL's `use_bias_correction_kl`).
    """
    return kl * ratio


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "low_var": low_var,
}


def token_kl(
    policy_logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor, estimator: str, bias_correction: bool = False
) -> Tensor:
    """The `algorithm.kl_estimator` value, times `ratio` with `algorithm.use_bias_correction_kl`. All [T], nats."""
    kl = ESTIMATORS[estimator](policy_logprobs, ref_logprobs)
    return importance_weighted(kl, ratio) if bias_correction else kl
