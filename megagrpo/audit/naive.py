"""One GRPO step written out as the papers have it, in float64, a sample at a time: transformers' model, the full softmax, torch's autograd.

No packing, no chunks, no parallelism, and nothing that the trainer computes with: this is what it is measured against. The loss is in
`naive_loss`, the advantages in `naive_advantages`. transformers computes rotary angles, and the routing of mixtures of experts, in float32
whatever the weights are.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType

import torch
from torch import Tensor, nn

from megagrpo.config import AlgorithmSection, RolloutSection


def load_model(folder: Path, dtype: str, longest: int | None = None) -> nn.Module:
    """The weights in `folder`, rounded to `dtype` as the trainer holds them, in a float64 model. Under longrope the `longest` sequence of
    the run decides by which angles positions turn, as it does in vLLM; left to itself transformers decides for each sequence."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM  # slow to import
    from transformers.masking_utils import eager_mask
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    AttentionInterface.register("naive", _attention)
    AttentionMaskInterface.register("naive", eager_mask)
    kernels = dict(attn_implementation="naive", experts_implementation="eager")  # the grouped products of experts know no float64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **kernels).double().eval()
    for module in model.modules():  # transformers would round to float32 on the way
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_rms_norm, module)
        elif type(module).__name__.startswith("Gemma") and type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_centred_rms_norm, module)
        elif longest and getattr(module, "rope_type", None) == "longrope":
            module.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, seq_len=longest)  # what it has for short sequences
    model.get_input_embeddings().padding_idx = None  # torch gives that token no gradient, and chat models pad with one that ends turns
    return model


def _rms_norm(self: nn.Module, hidden: Tensor) -> Tensor:
    return self.weight * hidden * (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def _centred_rms_norm(self: nn.Module, hidden: Tensor) -> Tensor:
    return (1 + self.weight) * hidden * (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """softmax(scaling q k^T + mask) v, scores x with a softcap made softcap tanh(x / softcap): query [1, h, L, d], key and value
    [1, g, L, d] -> [1, L, h, d], as transformers calls it. The mask says what a token sees, windows included. `s_aux` [h] are scores of
    sinks, which take their share of the weights and give nothing."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = scaling * query @ key.transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)), dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2), None


def log_softmax(model: nn.Module, token_ids: Tensor, rollout: RolloutSection) -> Tensor:
    """[L - 1, V] log-probs of every next token of one sample, of the distribution that `rollout` samples from; those that it never
    samples are at -1e30, but for the sample's own."""
    logits = model(token_ids[None]).logits[0, :-1] / rollout.temperature
    if rollout.truncates:
        logits = logits.masked_fill(~_kept(logits.detach(), rollout).scatter(1, token_ids[1:, None], True), -1e30)
    return logits.log_softmax(dim=-1)


def _kept(logits: Tensor, rollout: RolloutSection) -> Tensor:
    """[n, V] bool: what min-p leaves, of it top-k, of it top-p, which adds up the largest until they reach it."""
    ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    left = ordered * (ordered >= rollout.min_p * ordered[:, :1])
    if rollout.top_k:
        left = left * (ordered >= ordered[:, min(rollout.top_k, ordered.shape[1]) - 1, None])
    left = left / left.sum(dim=-1, keepdim=True)
    return ((left > 0) & (left.cumsum(dim=-1) - left < rollout.top_p)).gather(1, order.argsort(dim=-1))


def router_probabilities(model: nn.Module, token_ids: Tensor, places: Tensor) -> Tensor:
    """[layers x Lr, E]: what each router of a mixture of experts makes of the tokens before those at `places` [Lr]."""
    layers = model(token_ids[None], output_router_logits=True).router_logits
    return torch.cat([layer[places - 1] for layer in layers]).softmax(dim=-1)


def balancing_slope(probabilities: Tensor, experts_per_token: int) -> Tensor:
    """[E]: derivative of E sum_i f_i P_i by every row [E] of `probabilities`; f_i, how often expert i is taken per row, is a constant and
    P_i the mean of the rows."""
    rows, experts = probabilities.shape
    taken = probabilities.topk(experts_per_token).indices.flatten().bincount(minlength=experts).to(probabilities.dtype)
    return experts * taken / rows**2


def kl_term(policy: Tensor, reference: Tensor, picked: Tensor, ratio: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """[Lr] the KL term of each response token. policy, reference [Lr, V] log-probs; picked, ratio [Lr] of the sampled tokens."""
    if algorithm.kl_estimator == "full_forward":
        return (reference.exp() * (reference - policy)).sum(dim=-1)
    if algorithm.kl_estimator == "full_reverse":
        return (policy.exp() * (policy - reference)).sum(dim=-1)
    return estimated_kl((reference - policy).gather(1, picked[:, None])[:, 0], ratio, algorithm)


def estimated_kl(d: Tensor, ratio: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """The KL term of tokens with d = reference - policy log-prob and the probability ratio to the policy that was sampled; of one shape."""
    clamped = d.clamp(-20, 20)
    estimates = {
        "k1": -d,
        "k2": d.square() / 2,
        "k3": d.exp() - d - 1,
        "abs": d.abs(),
        "low_var": (clamped.exp() - clamped - 1).clamp(max=10),
    }
    return estimates[algorithm.kl_estimator] * (ratio if algorithm.use_bias_correction_kl else 1)


def mismatch(old: Tensor, rollout: Tensor) -> dict[str, float]:
    """Means over tokens [K] of how far apart trainer and engine are, after NeMo-RL."""
    p, q = old.exp(), rollout.exp()
    m = (p + q) / 2

    def divergence(x: Tensor) -> Tensor:
        return x - x.log() - 1

    return {
        "token_mult_prob_error": torch.maximum(p / q, q / p).mean().item(),
        "gen_kl_error": divergence(p / q).mean().item(),
        "policy_kl_error": divergence(q / p).mean().item(),
        "js_divergence_error": ((divergence(p / m) + divergence(q / m)) / 2).mean().item(),
    }
