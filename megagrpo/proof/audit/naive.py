"""One GRPO step as in the papers, in float64, sample by sample: transformers' model, full softmax, torch's autograd.

It uses no packing, chunks or parallelism, and none of the trainer's code, because the trainer is measured against it.
The loss is in `naive_loss`, the advantages in `naive_advantages`. Rotary angles are in float32, as the trainer's are.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached
from torch.overrides import TorchFunctionMode

from megagrpo.config import AlgorithmSection, ConfigError, TeacherSection
from megagrpo.proof.audit.saved import Sample
from megagrpo.row_image import RowImage
from megagrpo.types import SamplingParams, Truncation

EDGE = 2e-5  # float32's rounding of a logit, in nats, and of a sum of probabilities


def load_model(folder: Path, dtype: str, longest: int | None = None) -> nn.Module:
    """Return a float64 model with the weights in `folder`, first rounded to `dtype` as in the trainer.

    Under longrope the `longest` sequence selects the rotary angles, as in vLLM; transformers selects them per sequence.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText  # slow to import
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # grouped products of experts do not support float64
    options = dict(attn_implementation="eager", experts_implementation="eager", trust_remote_code=False)
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "thinker_config", config)  # of a model that speaks, the part with logits
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    auto = (
        AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    )  # the latter may load the text model only
    model = auto.from_pretrained(folder, config=config, dtype=getattr(torch, dtype), **options).double().eval()
    exact = Float64()
    model.forward = exact.inside(model.forward)
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            module.forward = exact.outside(module.forward)
        if longest and getattr(module, "rope_type", None) == "longrope":
            # its angles for short sequences
            module.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, seq_len=longest)
    # torch gives the padding token no gradient, but chat models pad with an end token
    model.get_input_embeddings().padding_idx = None
    return model


class Float64(TorchFunctionMode):
    """Context manager in which casts from float64 to float32, as in transformers' norms and routers, change nothing."""

    on = True

    def inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` inside this context."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def outside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` with its casts."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.on = self.on, False
            try:
                return forward(*args, **kwargs)
            finally:
                self.on = before

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, in float64 where it would cast a float64 tensor to float32."""
        kwargs = kwargs or {}
        if self.on and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


class Routing(TorchFunctionMode):
    """Context manager of one pass of `model`: its routers take the experts `routes` [L, M, k], layer by layer, or their
    own if it is None. `taken` are the experts [L, k] of each layer in its order.

    A router of transformers chooses with one topk over all experts.
    """

    def __init__(self, model: nn.Module, routes: Tensor | None):
        super().__init__()
        config: Any = model.config
        config = config.get_text_config()  # of a multimodal model
        experts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._experts, self._routes = next(filter(None, experts), 0), routes
        self._per_token = getattr(config, "num_experts_per_tok", 0)
        self.taken: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or replace a router's choice."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or args[0].shape[-1] != self._experts:
            return result
        if result[1].shape[-1] != self._per_token:
            return result
        layer = len(self.taken)
        if self._routes is not None and layer == self._routes.shape[1]:  # transformers' own balancing loss
            return result
        self.taken.append(result[1] if self._routes is None else self._routes[:, layer].long())
        return args[0].gather(-1, self.taken[-1]), self.taken[-1]


def log_softmax(
    model: nn.Module,
    token_ids: Tensor,
    places: Tensor,
    sampling: SamplingParams,
    routes: Tensor | None = None,
    allowed: Tensor | None = None,
    images: Mapping[str, Tensor] = MappingProxyType({}),
    reported: Tensor | None = None,
) -> Tensor:
    """Return log-probs [Lr, V] at the `places` [Lr] of one sample that the policy wrote, in the distribution
    that it was sampled from.

    Tokens that it never samples have -1e30, except the sample's own tokens. With `routes` routers take these experts.
    `allowed` [Lr, V] are the tokens of structured outputs, `images` further arguments of the model. `reported` [Lr] are
    the run's log-probs: they select the kept tokens where rounding decides (`_kept`).
    """
    # with adapters weights are computed once
    with Routing(model, routes) if routes is not None else nullcontext(), cached():
        logits = model(token_ids[None], **images).logits[0, places - 1]
    logits = logits if allowed is None else logits.masked_fill(~allowed, -1e30)
    logits = _processed(logits, token_ids, places.tolist(), sampling) / sampling.temperature
    if sampling.truncation:
        own = token_ids[places, None]
        kept = _kept(logits.detach(), sampling.truncation, own, reported)
        logits = logits.masked_fill(~kept.scatter(1, own, True), -1e30)
    return logits.log_softmax(dim=-1)


def _processed(logits: Tensor, token_ids: Tensor, places: list[int], sampling: SamplingParams) -> Tensor:
    """Return logits [n, V] without forbidden tokens, with bias and penalty, token by token."""
    if not sampling.changes_logits or not places:
        return logits
    bias, penalty = torch.zeros(logits.shape[1], dtype=torch.float64), sampling.repetition_penalty
    for token, added in sampling.logit_bias:
        bias[token] = added
    if sampling.allowed_token_ids:
        others = torch.ones(logits.shape[1], dtype=torch.bool)
        others[list(sampling.allowed_token_ids)] = False
        logits = logits.masked_fill(others, -1e30)
    rows = []
    for row, place in zip(logits + bias, places, strict=True):
        seen = token_ids[:place].bincount(minlength=len(row))
        rows.append(torch.where(seen > 0, torch.where(row > 0, row / penalty, row * penalty), row))
    return torch.stack(rows)


def _kept(logits: Tensor, rules: Truncation, own: Tensor, reported: Tensor | None) -> Tensor:
    """Return [n, V] bool: tokens kept by min-p, then top-k, then top-p, which takes the largest until they sum to p.

    In float32 a token within `EDGE` of a rule's limit may be on either side of it. Among the sets that differ by such
    tokens, the one whose log-prob of the sampled token `own` [n, 1] is nearest to `reported` [n] is returned. Where
    that is NaN or None, float64 decides.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    position = order.argsort(dim=-1)  # every set holds the tokens of the first positions
    size = _set_size(ordered, rules, 0.0)
    if reported is not None:
        least, most = (_set_size(ordered, rules, edge) for edge in (-EDGE, EDGE))
        rows = ((least < most) & ~reported.isnan()).nonzero()[:, 0]  # few: the others need no distances
        own_logit, sums = logits.gather(1, own)[rows], ordered[rows].logcumsumexp(dim=-1)
        sizes = 1 + torch.arange(logits.shape[1])
        total = torch.where(sizes > position.gather(1, own)[rows], sums, torch.logaddexp(sums, own_logit))
        distance = (own_logit - total - reported[rows, None]).abs()
        distance = distance.masked_fill((sizes < least[rows, None]) | (sizes > most[rows, None]), math.inf)
        size[rows] = 1 + distance.argmin(dim=-1)
    return position < size[:, None]


def _set_size(ordered: Tensor, rules: Truncation, edge: float) -> Tensor:
    """Return [n]: how many of the largest logits [n, V], in descending order, the rules keep. Their limits are moved by
    `edge`, nats or probability, to keep more tokens."""
    kept = ordered > -1e29  # excluded tokens have -1e30, divided by the temperature
    if rules.min_p:
        kept = kept & (ordered >= ordered[:, :1] + math.log(rules.min_p) - edge)
    if rules.top_k:
        last = min(rules.top_k, ordered.shape[1]) - 1  # tokens that are equal to it are kept too
        first = torch.arange(ordered.shape[1]) <= last
        kept = kept & (first | ((edge >= 0) & (ordered >= ordered[:, last, None] - edge)))
    left = ordered.masked_fill(~kept, -math.inf).softmax(dim=-1)
    before = left.cumsum(dim=-1) - left
    return (kept & ((before < rules.top_p + edge) | (rules.top_p == 1))).sum(dim=-1).clamp(min=1)


def router_logits(
    model: nn.Module, token_ids: Tensor, places: Tensor, routes: Tensor | None, images: Mapping[str, Tensor]
) -> Tensor:
    """Return [layers x Lr, E]: the logits of each expert router at the tokens before `places` [Lr]."""
    with Routing(model, routes) if routes is not None else nullcontext():
        layers = model(token_ids[None], output_router_logits=True, **images).router_logits
    return torch.cat([layer[places - 1] for layer in layers])


def balancing_slope(probabilities: Tensor, experts_per_token: int, taken: Tensor | None = None) -> Tensor:
    """Return [E]: the derivative of E sum_i f_i P_i by every row [E] of `probabilities` [rows, E].

    f_i, the number of times that expert i is taken per row, is a constant. P_i is the mean of the rows. `taken` are the
    experts of all rows; None: those of the largest probabilities.
    """
    rows, experts = probabilities.shape
    taken = probabilities.topk(experts_per_token).indices if taken is None else taken
    return experts * taken.flatten().bincount(minlength=experts).to(probabilities.dtype) / rows**2


def kl_term(policy: Tensor, reference: Tensor, picked: Tensor, ratio: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Return [Lr]: the KL term of each response token. policy and reference are [Lr, V] log-probs; picked [Lr] are the
    sampled tokens' ids, ratio [Lr] their probability ratios."""
    if algorithm.kl_estimator == "full_forward":
        return (reference.exp() * (reference - policy)).sum(dim=-1)
    if algorithm.kl_estimator == "full_reverse":
        return (policy.exp() * (policy - reference)).sum(dim=-1)
    return estimated_kl((reference - policy).gather(1, picked[:, None])[:, 0], ratio, algorithm)


def divergence(policy: Tensor, teacher: Tensor, section: TeacherSection) -> Tensor:
    """Return [Lr]: the divergence of a teacher's term at each response token, from [Lr, V] log-probs."""
    if isinstance(section.over, int):  # the teacher's most likely tokens, and the others together
        ids = teacher.topk(min(section.over, teacher.shape[-1]), dim=-1).indices
        parts = [rows.gather(-1, ids) for rows in (policy, teacher)]
        left = [(1 - rows.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-7).log() for rows in parts]
        policy, teacher = (torch.cat(pair, dim=-1) for pair in zip(parts, left, strict=True))
    p, q, mix = policy.exp(), teacher.exp(), section.mix
    middle = mix * q + (1 - mix) * p

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (torch.xlogy(first, first) - torch.xlogy(first, second)).sum(dim=-1)

    return {
        "forward": lambda: (q * (teacher - policy)).sum(dim=-1),
        "reverse": lambda: (p * (policy - teacher)).sum(dim=-1),
        "jensen_shannon": lambda: mix * kl(q, middle) + (1 - mix) * kl(p, middle),
        "skewed_forward": lambda: kl(q, middle),
        "skewed_reverse": lambda: kl(p, mix * p + (1 - mix) * q),
    }[section.divergence]()


def estimated_kl(d: Tensor, ratio: Tensor, algorithm: AlgorithmSection) -> Tensor:
    """Return the KL term of tokens with d = reference - policy log-prob and the probability ratio to the sampling
    policy; all have one shape."""
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
    """Return means over tokens [K] of the difference between trainer and engine log-probs, as in NeMo-RL."""
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


def image_inputs(folder: Path, model: Any, sample: Sample) -> dict[str, Tensor]:
    """Return the arguments of a forward pass that hold the sample's images, from the image processor in `folder`; {}
    without images. Raises ConfigError if the response holds an image token, which transformers takes for an image."""
    if not sample.images:
        return {}
    is_image = sample.token_ids == model.config.image_token_id
    if is_image[sample.prompt_length :].any():
        raise ConfigError("--step: a response holds an image token, which transformers takes for an image")
    pictures = [RowImage(str(file)).rgb() for file in sample.images]
    made = _processor(folder)(images=pictures, return_tensors="pt")
    made["token_type_ids"] = made["mm_token_type_ids"] = is_image[None].int()  # models take one of them
    taken = inspect.signature(model.forward).parameters
    inputs = {name: tensor for name, tensor in made.items() if name in taken}
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@functools.cache
def _processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)


def freeze_tower(model: Any) -> None:
    """Freeze all parameters but those of the language model."""
    language: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    trained = {id(parameter) for module in language for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
