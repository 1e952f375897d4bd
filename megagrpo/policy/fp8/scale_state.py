"""The scales of delayed FP8 as a part of a checkpoint: the same tensors whether Transformer Engine multiplies or torch, in any layout."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagrpo import device
from megagrpo.parallel.layout import Layout
from megagrpo.policy.fp8.delayed_scaling import Slot
from megagrpo.policy.fp8.products import OutsideFp8

from megatron.core import fp8_utils  # isort: skip  (after megagrpo.device, which prepares the platform)
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


@dataclass(frozen=True)
class _Linear:
    """What one product of linears goes by: views of magnitudes [length, 3], newest first, and of scales [3], one column each for input,
    weight and output's gradient. Transformer Engine has them in two places, and a third column for outputs, which stay as they are."""

    amaxes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    def read(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.amaxes, 1), torch.cat(self.scales)

    def write(self, amaxes: Tensor, scales: Tensor) -> None:
        for target, value in zip(self.amaxes, amaxes.split([t.shape[1] for t in self.amaxes], 1), strict=True):
            target.copy_(value)
        for target, value in zip(self.scales, scales.split([t.shape[0] for t in self.scales]), strict=True):
            target.copy_(value)


@torch.no_grad()
def sharded_scales(chunks: Sequence[nn.Module], layout: Layout) -> dict[str, ShardedTensor]:
    """Magnitudes [1 or experts, length, 3] and scales [1 or experts, 3] of every linear in FP8, by name; empty without delayed scaling.

    Collective over the ranks that share scales: what they noted since scales changed last becomes the same on all of them, which changes
    nothing of what follows.
    """
    linears = _linears(chunks)
    _share_newest([linear for group in linears.values() for linear in group], layout)
    found = {}
    for name, group in linears.items():
        of_experts = ".experts." in name
        copy = (0, layout.etp_rank, layout.expert_copy) if of_experts else (0, layout.tp_rank, layout.dp_cp_rank)
        offsets = [(0, layout.ep_rank, layout.ep_size)] if of_experts else []
        amaxes, scales = (torch.stack(values) for values in zip(*(linear.read() for linear in group), strict=True))
        for what, value in (("amaxes", amaxes), ("scales", scales)):
            key = f"fp8.{name}.{what}"
            found[key] = ShardedTensor.from_rank_offsets(key, value, *offsets, replica_id=copy)
    return found


@torch.no_grad()
def load_scales(chunks: Sequence[nn.Module], loaded: dict[str, Tensor]) -> None:
    """Take over what a checkpoint held under the keys of `sharded_scales`."""
    for name, group in _linears(chunks).items():
        amaxes, scales = loaded[f"fp8.{name}.amaxes"], loaded[f"fp8.{name}.scales"]
        for linear, *values in zip(group, amaxes, scales, strict=True):
            linear.write(*values)


def _linears(chunks: Sequence[nn.Module]) -> dict[str, list[_Linear]]:
    """By name of the module in the whole model, without the number of an expert; one of each expert of this rank, else a single one."""
    found = defaultdict(list)
    for chunk in chunks:
        for layer in (layer for layer in chunk.decoder.layers if not isinstance(layer, OutsideFp8)):
            for name, module in layer.named_modules():
                found[f"layers.{layer.layer_number - 1}.{re.sub(r'[.]local_experts[.][0-9]+', '', name)}"] += _of(module, chunk.config)
    return {name: group for name, group in found.items() if group}


def _of(module: nn.Module, config: TransformerConfig) -> Iterator[_Linear]:
    if isinstance(slot := getattr(module, "fp8", None), Slot):
        yield _Linear((slot.scaling.amaxes[:, slot.index],), (slot.scaling.scale[slot.index],))
    elif device.has_transformer_engine() and config.fp8_recipe == "delayed" and config.fp8:
        yield from _of_transformer_engine(module, config)


def _of_transformer_engine(module: nn.Module, config: TransformerConfig) -> Iterator[_Linear]:
    """Its own `_extra_state` is a pickle, which it refuses to load."""
    if not hasattr(module, "fp8_meta") or not any(name.startswith("weight") for name, _ in module.named_parameters(recurse=False)):
        return
    meta, count = module.fp8_meta, getattr(module, "num_gemms", 1)
    if "scaling_fwd" not in meta:  # nothing has been multiplied yet
        meta["num_gemms"], meta["recipe"] = count, fp8_utils.get_fp8_recipe(config)
        with fp8_utils.get_fp8_context(config):  # beside the recipe that it is given it asks for the one that is in force
            module.init_fp8_meta_tensors(meta["recipe"])
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    for i in range(count):  # forward: input, weight, output; backward: gradient of the output, of the input
        two, one = slice(3 * i, 3 * i + 2), slice(2 * i, 2 * i + 1)
        yield _Linear(
            (forward.amax_history[:, two], backward.amax_history[:, one]),
            (forward.scale[two], backward.scale[one]),
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
