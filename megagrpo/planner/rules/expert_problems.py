"""Checks settings of a mixture of experts against the model: its routers, their losses, and overlapped messages."""

from __future__ import annotations

from collections.abc import Iterator

from megagrpo.config import Problem, RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.hidden_messages import refused_by_model


def expert_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield violated requirements and limits of a mixture of experts, and expert settings on a model without any."""
    p, coefficient = config.parallel, config.algorithm.router_aux_loss_coef
    balance = ("algorithm.router_aux_loss_coef",)
    yield from _overlap_problems(config, model)
    if config.rollout.routing_replay != "off" and not model.experts:
        said = f"{config.rollout.routing_replay}, but {model.family} has no experts; set it to off"
        yield Problem(("rollout.routing_replay",), said)
    if model.experts and model.experts.per_token > model.experts.count:
        said = f"num_experts_per_tok {model.experts.per_token} exceeds the model's {model.experts.count} experts;"
        yield Problem(("model",), f"{said} correct config.json")
    if model.experts and p.tp > 1 and not p.sequence_parallel:
        said = f"false, but the experts of {model.family} need it with parallel.tp={p.tp}; set it to true"
        yield Problem(("parallel.sequence_parallel", "parallel.tp"), said)
    if coefficient and model.experts and (model.experts.sigmoid or model.experts.groups > 1):
        why = "the balancing loss needs experts chosen by softmax, without groups"
        yield Problem(balance, f"{coefficient:g}, but {why}, unlike those of {model.family}; set it to 0")
    for key, value in {
        "router_aux_loss_coef": coefficient,
        "moe_router_bias_update_rate": config.algorithm.moe_router_bias_update_rate,
    }.items():
        if value and not model.experts:
            yield Problem((f"algorithm.{key}",), f"{value:g}, but {model.family} has no experts; set it to 0")
    if config.train.freeze_moe_router and not model.experts:
        said = f"true, but {model.family} has no experts; set it to false"
        yield Problem(("train.freeze_moe_router",), said)
    if (rate := config.algorithm.moe_router_bias_update_rate) and model.experts and not model.experts.bias:
        said = f"{rate:g}, but the routers of {model.family} have no selection bias; set it to 0, or use"
        yield Problem(("algorithm.moe_router_bias_update_rate",), f"{said} algorithm.router_aux_loss_coef")


def _overlap_problems(config: RunConfig, model: HfConfig) -> Iterator[Problem]:
    """Yield overlaps that the model does not allow, and a dispatcher for experts that it does not have."""
    if not model.experts and config.parallel.expert_dispatcher != "alltoall":
        said = f"{config.parallel.expert_dispatcher}, but {model.family} has no experts; choose alltoall"
        yield Problem(("parallel.expert_dispatcher",), said)
    for name in config.train.overlap:
        if reason := refused_by_model(name, model):
            yield Problem(("train.overlap",), f"{name}, but {reason}; leave it out")
