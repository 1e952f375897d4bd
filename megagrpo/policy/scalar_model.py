"""A model whose head is one number per token: a critic's values, a reward model's scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megagrpo.platform.parallel.context import RankBatch
from megagrpo.policy.build import head_input, lm_head, logit_scale
from megagrpo.policy.layers.scalar_head import ScalarHead
from megagrpo.policy.lm_head.task import Upstream
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import LossInputs


class ScalarModel(MegatronPolicy):
    """A policy whose "log-probs" are the head's numbers. The LM head stays as it is: unused, and frozen unless it is
    the embedding. With LoRA the adapters and the whole head are trained."""

    head: ScalarHead | None = None  # on the last pipeline stage

    def _build_chunks(self) -> list[nn.Module]:
        chunks = super()._build_chunks()
        if self.layout.is_last_stage:
            self.head = chunks[-1].scalar_head = ScalarHead(self.hf_config.hidden_size, self.layout, self.dtype)
            if not self.hf_config.tied_embeddings:
                lm_head(chunks[-1]).requires_grad = False
        return chunks

    def _loss_inputs(
        self, hidden: Tensor, item: RankBatch, chunk: nn.Module, early: Upstream | None = None
    ) -> LossInputs:
        assert self.head is not None, "only the last stage computes losses"
        states = head_input(chunk, hidden).index_select(0, item.loss) / logit_scale(chunk)
        values = self._whole_rows(self.head(states), item)
        return LossInputs(values, torch.zeros_like(values), item.micro_batch)

    def fill_head(self, weight: Tensor) -> None:
        """Write the head's weight [H], the same on all ranks."""
        if self.head is not None:
            self.head.weight.data[0].copy_(weight[self.head.own])
        self.weights_changed()

    def head_weight(self, part: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
        """Return the head's weight [H], or another `part` of it, float32 on the host of every rank. Collective."""
        whole, layout = torch.zeros(self.hf_config.hidden_size), self.layout
        if self.head is not None and layout.dp_rank == layout.cp_rank == 0:
            whole[self.head.own] = part(self.head.weight)[0].float().cpu()
        return layout.all_reduce(whole)
