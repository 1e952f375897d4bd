"""AdamW on torch's fused kernel with the state layout of APEX's FusedAdam: `step` is in the param group. Megatron's
distributed optimizer saves and loads this layout only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101). Bias correction is always on.

    With `adam_w_mode=False` weight decay is added to the gradient. Other keyword arguments of APEX are ignored.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        **_: object,
    ):
        if not bias_correction:
            raise ValueError("bias_correction: False is not supported by FusedAdam")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=True))
        self._kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "megatron-core never passes a closure"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        grads = [p.grad for p in params if p.grad is not None]
        moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        self._update(group, params, grads, moments)

    def _update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]]
    ) -> None:
        """Update `params` and both lists of `moments` in place, with the settings of `group`."""
        step = torch.tensor(float(group["step"]), device=params[0].device)
        self._kernel(
            params,
            grads,
            moments[0],
            moments[1],
            [],
            [step.clone() for _ in params],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=float(group["weight_decay"]),
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
