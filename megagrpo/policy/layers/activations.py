"""The activation of an MLP that has parameters of its own, xIELU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megagrpo.policy.layers.elementwise import xielu

XIELU_CONSTANTS = ("activation_func.beta", "activation_func.eps")  # ends of the names of buffers that files hold


class Xielu(nn.Module):
    """xIELU with two trained parameters, which all tensor-parallel ranks hold, and two constants from the files."""

    def __init__(self, config: TransformerConfig, tp_group: Any):
        super().__init__()
        self.tp_group = tp_group
        self.beta: Tensor
        self.eps: Tensor
        where = dict(dtype=config.params_dtype, device=torch.cuda.current_device())
        for name, start in (("alpha_p", 0.8), ("alpha_n", 0.3)):  # softplus of the parameters
            self.register_parameter(name, nn.Parameter(torch.full((1,), start, **where).expm1().log()))
        for name, constant in (("beta", 0.5), ("eps", -1e-6)):
            self.register_buffer(name, torch.full((1,), constant, **where))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of this rank's part of the elements, [..., F / tp]."""
        # each rank's gradient covers its elements, so it is summed over the ranks
        own = (self.alpha_p, self.alpha_n)
        parameters = (copy_to_tensor_model_parallel_region(one, group=self.tp_group) for one in own)
        positive, negative = map(F.softplus, parameters)  # in the parameters' dtype, as transformers and vLLM
        wide = torch.promote_types(x.dtype, torch.float32)
        constants = positive, self.beta + negative, self.beta, self.eps
        return xielu(x, *(constant.to(wide) for constant in constants))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return parameters and constants, of which tensor-parallel ranks hold copies."""
        groups = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, **groups)


@functools.cache
def with_xielu(base: Any) -> Any:
    """Return a subclass of `base`, Megatron's MLP, whose activation is `Xielu`."""

    class XieluMLP(base):
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            self.activation_func = Xielu(config, self.tp_group)

    return XieluMLP
