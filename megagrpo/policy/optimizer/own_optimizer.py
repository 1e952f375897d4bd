"""The user's optimizer and schedule: `train.optimizer` and `train.lr_scheduler_type` as `path/file.py:name`.

Both are tried on a few numbers before the model is built. Megatron keeps its part: float32 masters, the clipped norm,
parameter groups without weight decay for norms and biases, skipped steps, and checkpoints."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim import Optimizer

from megagrpo.config import Problem, ProblemError, TrainSection
from megagrpo.platform.process import user_code

Schedule = Callable[[int, int, TrainSection], float]
OPTIMIZER_KEY, SCHEDULE_KEY = "train.optimizer", "train.lr_scheduler_type"
_OPTIMIZER = "an optimizer is a subclass of torch.optim.Optimizer, called with (params, lr=, weight_decay=, **args)"
_SCHEDULE = "a schedule takes (step, total_steps, train) and returns the learning rate (docs/optimizers.md)"


def own_optimizer(train: TrainSection) -> Callable[..., Optimizer]:
    """Return what builds the user's optimizer from Megatron's arguments for Adam. Raises ProblemError when the import
    or the trial on a few parameters fails."""
    kind = _imported(OPTIMIZER_KEY, train.optimizer)
    if fault := _optimizer_fault(kind, train):
        raise ProblemError(Problem((OPTIMIZER_KEY,), f"`{train.optimizer}` {fault}"))

    def build(params: Any, lr: float, weight_decay: float, **_: Any) -> Optimizer:
        return kind(params, lr=lr, weight_decay=weight_decay, **train.optimizer_args)

    return build


def create_state(own: Optimizer, config: Any = None) -> None:
    """Create the state of the user's optimizer before a checkpoint fills it, by a step with gradients of 0.

    Weights keep their values. Megatron calls it as `init_state_fn`.
    """
    parameters = [p for group in own.param_groups for p in group["params"]]
    if all(own.state.get(p) for p in parameters):
        return
    before, rates = [p.detach().clone() for p in parameters], [group["lr"] for group in own.param_groups]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in own.param_groups:
        group["lr"] = 0.0
    own.step()
    with torch.no_grad():
        for p, value, gradient in zip(parameters, before, gradients, strict=True):
            p.copy_(value)
            p.grad = gradient
    for group, rate in zip(own.param_groups, rates, strict=True):
        group["lr"] = rate


class OwnSchedule(OptimizerParamScheduler):
    """Megatron's scheduler with the learning rate of the user's function."""

    def __init__(self, train: TrainSection, total_steps: int, *args: Any, **options: Any):
        self._rate = functools.partial(_rate, own_schedule(train), total_steps, train)
        super().__init__(*args, **options)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of the optimizer step `num_steps`, counted from 1. Raises ValueError for an invalid rate."""
        return self._rate(max(self.num_steps, 1))


def own_schedule(train: TrainSection) -> Schedule:
    """Return the function of `train.lr_scheduler_type`. Raises ProblemError when its import or its trial fails."""
    schedule = _imported(SCHEDULE_KEY, train.lr_scheduler_type)
    for step in (1, 2, 10):
        try:
            _rate(schedule, 10, train, step)
        except ValueError as error:
            raise ProblemError(Problem((SCHEDULE_KEY,), str(error))) from error
        except Exception as error:
            fault = f"raised {user_code.described(error)}; {_SCHEDULE}"
            raise ProblemError(Problem((SCHEDULE_KEY,), f"`{train.lr_scheduler_type}` {fault}")) from error
    return schedule


def _rate(schedule: Schedule, total_steps: int, train: TrainSection, step: int) -> float:
    found: object = schedule(step, total_steps, train)  # of the user's function, whatever its types say
    if not isinstance(found, (int, float)) or isinstance(found, bool) or not math.isfinite(found) or found < 0:
        raise ValueError(
            f"`{train.lr_scheduler_type}` returned {found!r} for step {step} of {total_steps}; {_SCHEDULE}"
        )
    return float(found)


@functools.cache
def _imported(key: str, name: str) -> Any:
    try:
        return user_code.load_named(name)
    except ValueError as error:
        raise ProblemError(Problem((key,), f"`{name}` {error}")) from error


def _optimizer_fault(kind: Any, train: TrainSection) -> str | None:
    """Return why `kind` cannot train or be saved, or None, from two steps of a matrix and a vector."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return f"is not an optimizer; {_OPTIMIZER}"
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), torch.nn.Parameter(torch.ones(3))]
    start = [p.detach().clone() for p in parameters]
    try:
        groups = [dict(params=[p], weight_decay=0.1 * (p.dim() > 1)) for p in parameters]
        build: Callable[..., Optimizer] = kind
        own = build(groups, lr=1e-2, weight_decay=0.1, **train.optimizer_args)
        for _ in range(2):
            for p in parameters:
                p.grad = torch.cos(7 * p.detach())
            own.step()
    except Exception as error:
        return f"raised {user_code.described(error)}; {_OPTIMIZER}"
    if not all(p.isfinite().all() for p in parameters):
        return "made parameters NaN or infinite from gradients of at most 1; correct the formula"
    if all(torch.equal(p, value) for p, value in zip(parameters, start, strict=True)):
        return "changed no parameter in two steps with lr=0.01; correct the formula"
    for p in parameters:
        for name, value in own.state.get(p, {}).items():
            if name != "step" and not (isinstance(value, torch.Tensor) and value.shape == p.shape):
                what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                return (
                    f"keeps `{name}` ({what}) for a parameter of {list(p.shape)}, which a checkpoint cannot shard; "
                    "keep tensors of the parameter's shape, and a number named step"
                )
    return None
