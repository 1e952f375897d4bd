"""Recomputes a dumped step with `naive`, from its tokens and rewards to its gradient norm."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.core_model_loading import revert_weight_conversion

from megagrpo.config import AlgorithmSection, TeacherSection
from megagrpo.data.tokens.grammar import Grammars, allowed
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.proof.audit import naive, naive_loss
from megagrpo.proof.audit.dumped_rows import Rows
from megagrpo.proof.audit.naive import freeze_tower, image_inputs
from megagrpo.proof.audit.naive_loss import Response, WholeStep
from megagrpo.proof.audit.saved import DumpedUpdate, Sample, Step


@dataclass(frozen=True)
class Elements:
    """Weight and gradient, float64 [n], at the dumped positions of a tensor with `dims` dimensions."""

    weight: Tensor
    gradient: Tensor
    dims: int


@dataclass
class Recomputed:
    """One recomputed optimizer step. Lists hold [Lr] float64 per sample: its policy tokens; None for unused samples."""

    policy_logprobs: list[Tensor | None] = field(default_factory=list)
    old_logprobs: list[Tensor | None] = field(default_factory=list)
    ref_logprobs: list[Tensor | None] = field(default_factory=list)
    entropy: list[Tensor | None] = field(default_factory=list)
    kl: list[Tensor | None] = field(default_factory=list)
    teachers: dict[str, list[Tensor | None]] = field(default_factory=dict)  # of each teacher's term, by its name
    loss: float = 0.0
    loss_size: float = 0.0  # `loss` of the terms' absolute values: the scale of its rounding error
    grad_norm: float = 0.0
    # by Hugging Face tensor name, if the dump samples the optimizer
    sampled: dict[str, Elements] = field(default_factory=dict)


def recompute(step: Step, advantages: list[Tensor]) -> Iterator[Recomputed]:
    """Yield every optimizer step of `step`, recomputed with the `advantages` [L] of its samples. At most the float64
    models of policy, reference and teachers and one gradient are in memory."""
    if step.config.rollout.routing_replay == "trainer":
        step = replace(step, samples=_with_routes(step))
    reference = model_of(step, step.reference).requires_grad_(False) if step.config.algorithm.beta else None
    others = _Others(reference, {name: _teacher(step, one) for name, one in step.config.algorithm.teachers.items()})
    old = _old_logprobs(step) if len(step.updates) > 1 else None
    for update in step.updates:
        yield _recompute_update(step, update, advantages, model_of(step, update.weights), others, old)


@dataclass(frozen=True)
class _Others:
    """The models that the policy is compared with."""

    reference: nn.Module | None
    teachers: dict[str, nn.Module]


@torch.no_grad()
def _taught(step: Step, others: _Others, index: int, reported: Tensor) -> dict[str, Tensor]:
    """Return [Lr, V] of each teacher that teaches sample `index`: its log-probs, after the prompt that it reads."""
    own, found = step.samples[index], dict[str, Tensor]()
    reads = own.text.get("teachers") or dict.fromkeys(others.teachers, ())
    for name, prompt in reads.items():
        sample, more = own, len(prompt or ()) - own.prompt_length
        if prompt:
            ids = torch.cat((own.token_ids.new_tensor(prompt), own.token_ids[own.prompt_length :]))
            sample = replace(own, token_ids=ids, prompt_length=len(prompt), places=own.places + more)
        if prompt is not None:
            found[name] = _log_softmax(step, others.teachers[name], sample, reported)
    return found


def _teacher(step: Step, section: TeacherSection) -> nn.Module:
    if section.urls:
        raise ValueError("algorithm.teacher.urls: a teacher behind servers cannot be computed again")
    if section.is_own:
        folder = step.reference if section.path == "reference" else step.updates[0].weights
        return model_of(step, folder).requires_grad_(False)
    folder = resolve_model(str(section.path), "algorithm.teacher.path")
    model: Any = naive.load_model(folder, step.dtype, step.config.longest_sequence).requires_grad_(False)
    if (rows := load_hf_config(step.model).vocab_size) < load_hf_config(folder).vocab_size:
        model.resize_token_embeddings(rows)  # the others are padding
    return model


def model_of(step: Step, folder: Path, base: Path | None = None) -> nn.Module:
    """Return the model with the weights in `folder`, or the run's initial model with the adapter in `folder`."""
    adapts = (folder / "adapter_config.json").is_file()
    model = naive.load_model(step.model if adapts else folder, step.dtype, step.config.longest_sequence)
    if adapts:
        add_adapter(model, folder)
    if step.config.towers == "frozen":
        freeze_tower(model)
    for module in model.modules() if step.config.train.freeze_moe_router else ():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.requires_grad_(False)
    return model


@torch.no_grad()
def _old_logprobs(step: Step) -> list[Tensor]:
    """Return [Lr] of each sample, from the weights that generated it: the weights before the first optimizer step."""
    model = model_of(step, step.updates[0].weights)
    reported = dumped_columns(step, step.updates, "old_logprobs")
    return [
        _picked(_log_softmax(step, model, sample, row), sample)
        for sample, row in zip(step.samples, reported, strict=True)
    ]


def dumped_columns(step: Step, updates: Sequence[DumpedUpdate], name: str) -> list[Tensor]:
    """Return [Lr] of each sample: the column `name` in the first of the updates that has it; NaN where none has it."""
    columns = [Rows(step, update).by_sample(name) for update in updates]
    return [
        functools.reduce(lambda row, later: row.where(~row.isnan(), later), rows) for rows in zip(*columns, strict=True)
    ]


@torch.no_grad()
def _with_routes(step: Step) -> list[Sample]:
    """Return the samples with the routes that the pass for the old log-probs takes."""
    model, samples = model_of(step, step.updates[0].weights), []
    for sample in step.samples:
        with naive.Routing(model, None) as routing:
            model(sample.token_ids[None], **image_inputs(step.model, model, sample))
        samples.append(replace(sample, routes=torch.stack(routing.taken, dim=1)))
    return samples


def _log_softmax(step: Step, model: nn.Module, sample: Sample, reported: Tensor) -> Tensor:
    """Return [Lr, V]: the log-probs of every next token at the policy's tokens. `reported` [Lr] are the run's."""
    sampling = step.sampling_of(sample)
    may_follow = None if sampling.constraint is None else _allowed(step.grammars, sampling.constraint, sample)
    images = image_inputs(step.model, model, sample)
    tokens, places = sample.token_ids, sample.places
    return naive.log_softmax(model, tokens, places, sampling, sample.routes, may_follow, images, reported)


def router_logits(step: Step, model: nn.Module, sample: Sample) -> Tensor:
    images = image_inputs(step.model, model, sample)
    return naive.router_logits(model, sample.token_ids, sample.places, sample.routes, images)


def _allowed(grammars: Grammars, constraint: tuple[str, str], sample: Sample) -> Tensor:
    """Return [Lr, V] bool: the tokens that structured outputs allow in each turn of the policy."""
    places, ids = sample.places.numpy(), sample.token_ids.numpy()
    turns = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    masks = [grammars.masks(constraint, ids, int(turn[0]), int(turn[0]) - 1, turn.size) for turn in turns if turn.size]
    return allowed(torch.cat(masks), torch.arange(grammars.vocab_size))


def _picked(policy: Tensor, sample: Sample) -> Tensor:
    """Return [Lr] from [Lr, V]: the log-probs of the sampled tokens."""
    return policy.gather(1, sample.token_ids[sample.places][:, None])[:, 0]


def _recompute_update(
    step: Step,
    update: DumpedUpdate,
    advantages: list[Tensor],
    model: nn.Module,
    others: _Others,
    old: list[Tensor] | None,
) -> Recomputed:
    algorithm, rollout, reference = step.config.algorithm, step.config.rollout, others.reference
    lengths = step.loss_lengths(update)
    average, longest = algorithm.loss.average, rollout.max_completion_length
    divisor = naive_loss.denominator(list(lengths.values()), average, longest)
    slope = balancing_slope(step, update, model) if algorithm.router_aux_loss_coef else None
    reported, ref_reported = (dumped_columns(step, [update], name) for name in ("policy_logprobs", "ref_logprobs"))
    whole = _whole_step(step, update, advantages, model, old, reported)
    result = Recomputed()
    task_weights = naive_loss.weights_of_tasks(lengths, step.task_of, step.config)
    for index, (sample, advantage) in enumerate(zip(step.samples, advantages, strict=True)):
        elsewhere = index not in update.samples
        if elsewhere or step.is_masked(sample) or (algorithm.leaves_out_zero_advantage and not advantage.any()):
            _append(result, None, None, None, None, None)
            continue
        policy = _log_softmax(step, model, sample, reported[index])
        response = _response(step, index, policy, advantage, old)
        taught = _taught(step, others, index, reported[index])
        teachers = {name: algorithm.teachers[name] for name in taught}
        for name, section in teachers.items():
            if section.over == "sampled":
                apart = response.old - _picked(taught[name], sample)
                moved = response.advantage - section.weight_at(step.number) * apart
                response = replace(response, advantage=moved)
        share = divisor * naive_loss.share(average, lengths[sample.sequence])
        terms = _policy_terms(response, whole, algorithm, share)
        ref_picked = kl = None
        if reference is not None:
            with torch.no_grad():
                ref = _log_softmax(step, reference, sample, ref_reported[index])
            ref_picked = _picked(ref, sample)
        if reference is not None and not algorithm.kl_in_reward:
            ratio = naive_loss.probability_ratio(response.logprobs - response.old, algorithm.importance_sampling_level)
            kl = naive.kl_term(policy, ref, sample.token_ids[sample.places], ratio, algorithm)
            terms.append(algorithm.beta * kl / share)
        for name, section in teachers.items():
            value = _picked(taught[name], sample)
            if section.over != "sampled":
                value = naive.divergence(policy, taught[name], section)
                terms.append(section.weight_at(step.number) * value / share)
            result.teachers.setdefault(name, [None] * len(step.samples))[index] = value.detach()
        weight = task_weights[step.task_of(sample.trajectory)]
        terms = [term if i == 1 else term * weight for i, term in enumerate(terms)]  # term 1 is the entropy bonus
        sum((term.sum() for term in terms[1:]), terms[0].sum()).backward()
        if slope is not None:
            (router_logits(step, model, sample).softmax(dim=-1) @ slope).sum().backward()
        result.loss += sum(term.sum().item() for term in terms)
        result.loss_size += sum(term.detach().abs().sum().item() for term in terms)
        _append(result, response.logprobs, response.old, ref_picked, response.entropy, kl)
    squares = [parameter.grad.square().sum().item() for parameter in model.parameters() if parameter.grad is not None]
    result.grad_norm = sum(squares) ** 0.5
    result.sampled = _elements(model, update)
    return result


@torch.no_grad()
def _elements(model: nn.Module, update: DumpedUpdate) -> dict[str, Elements]:
    """Return sampled elements of every tensor of transformers' model, with its checkpoints' names and shapes."""
    if not update.optimizer:
        return {}
    weights = adapter_of(model) or {name: parameter for name, parameter in model.named_parameters()}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
    if not update.optimizer.keys() <= weights.keys():
        weights, gradients = (revert_weight_conversion(model, dict(tensors)) for tensors in (weights, gradients))
    elements = {}
    for name in update.optimizer.keys() & weights.keys():
        places = update.optimizer[name].places
        weight, gradient = weights[name].flatten()[places], gradients[name].flatten()[places]
        elements[name] = Elements(weight, gradient, weights[name].dim())
    return elements


def _response(step: Step, index: int, policy: Tensor, advantage: Tensor, old: list[Tensor] | None) -> Response:
    """Return the response of sample `index`; `policy` [Lr, V] are its log-probs of every next token."""
    sample = step.samples[index]
    logprobs = _picked(policy, sample)
    entropy = -(policy.exp() * policy).sum(dim=-1)
    before = logprobs.detach() if old is None else old[index]
    rollout = sample.rollout_logprobs[sample.places].double()
    return Response(logprobs, before, rollout, entropy, sample.places, advantage[sample.places])


def _policy_terms(response: Response, whole: WholeStep, algorithm: AlgorithmSection, share: float) -> list[Tensor]:
    """Return [Lr] each: the policy term and the entropy bonus."""
    of_policy = naive_loss.policy_term(response, algorithm, whole.entropy_threshold) / share
    return [of_policy, -whole.bonus * response.entropy * (response.entropy >= whole.entropy_threshold)]


@torch.no_grad()
def _whole_step(
    step: Step,
    update: DumpedUpdate,
    advantages: list[Tensor],
    model: nn.Module,
    old: list[Tensor] | None,
    reported: list[Tensor],
) -> WholeStep:
    """Compute the values that responses' losses take from each other, by running the model on all of them first."""
    algorithm, whole = step.config.algorithm, WholeStep()
    coefficient = update.metric("entropy_coef") if algorithm.entropy_bonus else 0.0
    if algorithm.top_entropy_quantile == 1 and not coefficient:
        return whole
    responses = {}
    for index, (sample, advantage) in enumerate(zip(step.samples, advantages, strict=True)):
        if index in update.samples and not step.is_masked(sample):
            policy = _log_softmax(step, model, sample, reported[index])
            responses[index] = _response(step, index, policy, advantage, old)
    entropies = [value for response in responses.values() for value in response.entropy.tolist()]
    if algorithm.top_entropy_quantile < 1 and entropies:
        whole.entropy_threshold = naive_loss.top_threshold(entropies, algorithm.top_entropy_quantile)
    whole.bonus = coefficient / max(1, sum(value >= whole.entropy_threshold for value in entropies))
    return whole


@torch.no_grad()
def balancing_slope(step: Step, update: DumpedUpdate, model: nn.Module) -> Tensor:
    """Return [E]: the contribution of the balancing loss to the gradient of each router probability."""
    samples = [step.samples[i] for i in update.samples if not step.is_masked(step.samples[i])]
    rows = [router_logits(step, model, sample).softmax(dim=-1) for sample in samples]
    taken = [sample.routes[sample.places - 1].flatten() for sample in samples if sample.routes is not None]
    per_token: int = attrgetter("config.num_experts_per_tok")(model)
    slope = naive.balancing_slope(torch.cat(rows), per_token, torch.cat(taken).long() if taken else None)
    return step.config.algorithm.router_aux_loss_coef * slope


def _append(result: Recomputed, *rows: Tensor | None) -> None:
    names = ("policy_logprobs", "old_logprobs", "ref_logprobs", "entropy", "kl")
    for name, row in zip(names, rows, strict=True):
        getattr(result, name).append(None if row is None else row.detach())


PREFIX, BASE = "base_model.model.", ".base_layer"  # PEFT's, around the module's name
ENDS = ("lora_A.weight", "lora_B.weight")  # of PEFT's names of tensors


class _Sum(nn.Module):
    """W + scale B A (LoRA, arXiv 2106.09685). The weights [experts, ...] of all experts have A [experts x rank, in] and
    B [out, rank x experts].

    `trained` has A and B by the ends of their names in PEFT's files.
    """

    def __init__(self, name: str, trained: dict[str, Tensor], scale: float, transposed: bool):
        super().__init__()
        self.name, self.scale, self.transposed = name, scale, transposed
        self.ends, self.trained = tuple(trained), nn.ParameterList(tensor.double() for tensor in trained.values())

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in the weight's shape."""
        a, b = self.trained
        if weight.dim() == 2:
            return weight + self.scale * b @ a
        a, b = a.unflatten(0, (len(weight), -1)), b.unflatten(1, (-1, len(weight)))
        return weight + self.scale * torch.einsum("ore,eri->eio" if self.transposed else "ore,eri->eoi", b, a)


def add_adapter(model: nn.Module, folder: Path) -> None:
    """Add the adapter in the PEFT folder `folder` to a float64 model, whose own weights get no gradient from now on."""
    saved = json.loads((folder / "adapter_config.json").read_text())
    scale = saved["lora_alpha"] / saved["r"] ** (0.5 if saved.get("use_rslora") else 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    model.requires_grad_(False)
    for name in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        module = model.get_submodule(name.removeprefix(PREFIX).removesuffix(BASE))
        trained = {end: tensors[f"{name}.{end}"] for end in ENDS}
        a, b = trained.values()
        transposed = getattr(module, "is_transposed", False)
        own = _Sum(name, trained, scale, transposed)
        parametrize.register_parametrization(module, _parameter(module, a, b, transposed), own)


def _parameter(module: nn.Module, a: Tensor, b: Tensor, transposed: bool) -> str:
    """Return the name of the module's parameter that the adapter fits: a linear's weight, or one of all experts'."""
    if hasattr(module, "weight"):
        return "weight"
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    (name,) = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3 and p.shape[1:] == shape]
    return name


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's adapter by their names in PEFT's files; empty without one."""
    adapters = [module for module in model.modules() if isinstance(module, _Sum)]
    return {f"{one.name}.{end}": one.trained[index] for one in adapters for index, end in enumerate(one.ends)}
