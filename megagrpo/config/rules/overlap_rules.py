"""Checks `train.overlap` and `parallel.expert_dispatcher` against the rest of the configuration.

Conditions of megatron-core 0.19.2 are those of `TransformerConfig.__post_init__`, `MoEFlexTokenDispatcher` and
`DistributedDataParallel`; group sizes of DeepEP are those of its `Buffer.get_dispatch_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig

OVERLAPS = ("param_gather", "tp", "experts", "shared_experts", "weight_gradients")
DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
_Reasons = Iterator[tuple[str, str]]  # (dotted key, reason and fix)


def overlap_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what prevents the overlaps and the dispatcher that the config asks for."""
    for name in config.train.overlap:
        for key, reason in refusals(config, name):
            yield Problem(("train.overlap", key), f"{name} {reason}")
    p, dispatcher = config.parallel, ("parallel.expert_dispatcher", "parallel.ep", "parallel.etp")
    if p.expert_dispatcher == "alltoall":
        return
    if p.ep * p.expert_tp == 1:
        reason = "has nothing to send: parallel.ep x parallel.etp is 1; choose alltoall, or raise ep"
        yield Problem(dispatcher, f"{p.expert_dispatcher} {reason}")
    elif p.expert_dispatcher == "deepep" and p.ep * p.expert_tp not in DEEPEP_RANKS:
        sizes = ", ".join(map(str, DEEPEP_RANKS))
        reason = f"supports groups of {sizes} ranks, but ep {p.ep} x etp {p.expert_tp} = {p.ep * p.expert_tp}"
        yield Problem(dispatcher, f"deepep {reason}; choose alltoall or another ep")
    if config.model.precision in ("fp16", "fp32"):
        other = config.model.precision
        reason = f"{p.expert_dispatcher} sends bf16 only, but model.precision is {other}; choose alltoall, or bf16"
        yield Problem(("parallel.expert_dispatcher", "model.precision"), reason)


def refusals(config: RunConfig, name: str) -> _Reasons:
    """Yield (key, reason) for each value of the config that excludes the overlap `name`, whether it is on or not."""
    yield from _RULES[name](config)


def _param_gather(config: RunConfig) -> _Reasons:
    if not config.train.distributed_optimizer:
        yield "train.distributed_optimizer", "needs train.distributed_optimizer: true, which gathers weights"
    if config.train.overlap_grad_reduce is False:
        yield "train.overlap_grad_reduce", "needs the buckets of train.overlap_grad_reduce, which is false"
    if config.algorithm.updates_per_step == 1:
        reason = "has no effect: the weight sync after the only optimizer step of a step needs all weights at once; "
        yield "algorithm.steps_per_generation", f"{reason}leave it out, or raise steps_per_generation"


def _tp(config: RunConfig) -> _Reasons:
    p = config.parallel
    if p.tp == 1 or not p.sequence_parallel:
        yield "parallel.sequence_parallel", "needs parallel.tp > 1 with parallel.sequence_parallel: true"
    if config.lora.enabled:
        yield "lora.rank", "needs Transformer Engine's linears, but adapters (lora.rank > 0) use Megatron's"
    if config.model.fp8_recipe != "none":
        yield "model.fp8_recipe", f"gathers bf16 only, but model.fp8_recipe is {config.model.fp8_recipe}; choose none"
    if config.model.precision in ("fp16", "fp32"):
        yield "model.precision", f"needs bf16, but model.precision is {config.model.precision}"


def _experts(config: RunConfig) -> _Reasons:
    m, p = config.model, config.parallel
    if p.ep == 1:
        yield "parallel.ep", "needs parallel.ep > 1: without it no tokens travel"
    if p.pp > 1 and p.vpp == 1:
        yield "parallel.vpp", "needs virtual stages with parallel.pp > 1; raise parallel.vpp"
    if m.recompute == "full" or (m.recompute == "selective" and "moe" in m.recompute_modules):
        yield "model.recompute", "does not support recomputed experts; set model.recompute to none or selective"
    if m.precision in ("fp16", "fp32"):
        yield "model.precision", f"needs bf16, but model.precision is {config.model.precision}"
    if "shared_experts" in config.train.overlap:
        yield "train.overlap", "already runs shared experts beside messages; leave shared_experts out"
    if m.offload_activations:
        yield "model.offload_activations", "calls parts of layers, which offloading cannot track; set it to 0"
    if m.fp8_recipe != "none":
        yield "model.fp8_recipe", f"calls parts of layers, outside the FP8 of {m.fp8_recipe}; choose none"
    if config.lora.enabled:
        yield "lora.rank", "is not supported with adapters (lora.rank > 0)"


def _shared_experts(config: RunConfig) -> _Reasons:
    if config.model.recompute == "selective" and "shared_experts" in config.model.recompute_modules:
        yield "model.recompute_modules", "cannot recompute shared experts alone; leave shared_experts out there"
    if config.lora.enabled:
        yield "lora.rank", "is not supported with adapters (lora.rank > 0)"


def _weight_gradients(config: RunConfig) -> _Reasons:
    if config.parallel.ep == 1:
        yield "parallel.ep", "needs parallel.ep > 1: without it no tokens travel"
    if config.lora.enabled:
        yield "lora.rank", "has no effect with adapters (lora.rank > 0): the experts are frozen; leave it out"


_RULES: dict[str, Callable[[RunConfig], _Reasons]] = {
    "param_gather": _param_gather,
    "tp": _tp,
    "experts": _experts,
    "shared_experts": _shared_experts,
    "weight_gradients": _weight_gradients,
}
