"""The scales of delayed FP8 in a checkpoint: the same tensors with Transformer Engine and with torch, in any layout."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.fp8.delayed_scaling import Slot
from megagrpo.policy.fp8.megatron_patches import OutsideFp8
from megagrpo.policy.layers.megatron_modules import layers_of


@dataclass(frozen=True)
class _Linear:
    """Views of one linear's amaxes [length, 3] and scales [3]. Row 0 of the amaxes collects, as in `DelayedScaling`.

    The three columns are input, weight and output gradient. Transformer Engine keeps them in two places and has one
    more column, for outputs, which are not rounded.
    """

    amaxes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return (amaxes [length, 3], scales [3]) as one copy."""
        return torch.cat(self.amaxes, 1), torch.cat(self.scales)

    def write(self, amaxes: Tensor, scales: Tensor) -> None:
        """Write amaxes [length, 3] and scales [3] into the views."""
        for target, value in zip(self.amaxes, amaxes.split([t.shape[1] for t in self.amaxes], 1), strict=True):
            target.copy_(value)
        for target, value in zip(self.scales, scales.split([t.shape[0] for t in self.scales]), strict=True):
            target.copy_(value)


@torch.no_grad()
def sharded_scales(chunks: Sequence[nn.Module], layout: Layout) -> dict[str, ShardedTensor]:
    """Return amaxes [1 or experts, length, 3] and scales [1 or experts, 3] by linear; empty without delayed scaling.

    Collective over the ranks that share scales: the amaxes noted since the last change of scales are max-reduced over
    them. This does not change any later scale.
    """
    linears = _linears(chunks)
    _share_newest([linear for group in linears.values() for linear in group], layout)
    sharded: dict[str, ShardedTensor] = {}
    for name, group in linears.items():
        of_experts = ".experts." in name
        copy = (0, layout.etp_rank, layout.expert_copy) if of_experts else (0, layout.tp_rank, layout.dp_cp_rank)
        offsets = [(0, layout.ep_rank, layout.parallel.ep)] if of_experts else []
        amaxes, scales = (torch.stack(values) for values in zip(*(linear.read() for linear in group), strict=True))
        for what, value in (("amaxes", amaxes), ("scales", scales)):
            key = f"fp8.{name}.{what}"
            sharded[key] = ShardedTensor.from_rank_offsets(key, value, *offsets, replica_id=copy)
    return sharded


@torch.no_grad()
def load_scales(chunks: Sequence[nn.Module], loaded: dict[str, Tensor]) -> None:
    """Load a checkpoint's tensors: [1 or experts, length, 3] and [1 or experts, 3], keyed as in `sharded_scales`."""
    for name, group in _linears(chunks).items():
        amaxes, scales = loaded[f"fp8.{name}.amaxes"], loaded[f"fp8.{name}.scales"]
        for linear, *values in zip(group, amaxes, scales, strict=True):
            linear.write(*values)


def _linears(chunks: Sequence[nn.Module]) -> dict[str, list[_Linear]]:
    """Return this rank's FP8 linears by whole-model name without expert number: one per local expert, else one."""
    linears: dict[str, list[_Linear]] = defaultdict(list)
    for chunk in chunks:
        for layer in (layer for layer in layers_of([chunk]) if not isinstance(layer, OutsideFp8)):
            for name, module in layer.named_modules():
                linears[f"layers.{layer.layer_number - 1}.{re.sub(r'[.]local_experts[.][0-9]+', '', name)}"] += _of(
                    module, chunk.config
                )
    return {name: group for name, group in linears.items() if group}


def _of(module: Any, config: TransformerConfig) -> Iterator[_Linear]:
    if isinstance(slot := getattr(module, "fp8", None), Slot):
        yield _Linear((slot.scaling.amaxes[:, slot.index],), (slot.scaling.scale[slot.index],))
    elif device.has_transformer_engine() and config.fp8_recipe == "delayed" and config.fp8:
        yield from _of_transformer_engine(module, config)


def _of_transformer_engine(module: Any, config: TransformerConfig) -> Iterator[_Linear]:
    """Yield the views of a Transformer Engine module, which refuses to load the pickle of its `_extra_state`."""
    if not hasattr(module, "fp8_meta") or not any(
        name.startswith("weight") for name, _ in module.named_parameters(recurse=False)
    ):
        return
    meta, count = module.fp8_meta, getattr(module, "num_gemms", 1)
    if "scaling_fwd" not in meta:  # nothing has been multiplied yet
        meta["num_gemms"], meta["recipe"] = count, fp8_utils.get_fp8_recipe(config)
        with fp8_utils.get_fp8_context(config):  # init_fp8_meta_tensors also reads the recipe of the active context
            module.init_fp8_meta_tensors(meta["recipe"])
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    for i in range(count):  # forward: input, weight, output; backward: gradient of the output, of the input
        two, one = slice(3 * i, 3 * i + 2), slice(2 * i, 2 * i + 1)
        yield _Linear(
            (forward.amax_history[:, two], backward.amax_history[:, one]), (forward.scale[two], backward.scale[one])
        )


def _share_newest(linears: list[_Linear], layout: Layout) -> None:
    group = layout.process_groups.tp_dp_cp
    if not linears or dist.get_world_size(group) == 1:
        return
    newest = torch.stack([linear.read()[0][0] for linear in linears])
    dist.all_reduce(newest, dist.ReduceOp.MAX, group=group)
    for linear, row in zip(linears, newest, strict=True):
        amaxes, scales = linear.read()
        amaxes[0] = row
        linear.write(amaxes, scales)
