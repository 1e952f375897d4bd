"""Mamba-2 over ranks: a checkpoint has MambaMixer's keys, and context-parallel ranks may share groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_steps import largest_excess, step_of
from layouts import AXES, config_of, ranks
from ranks import run_ranks
from tiny_policy import tiny_model

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.proof.verify.shrink import plainly


def two_groups() -> HfConfig:
    """A tiny Nemotron-H whose 16 heads have two groups of B and C."""
    sizes = dict(mamba_num_heads=16, mamba_head_dim=4, n_groups=2, ssm_state_size=6)
    return parse_hf_config(tiny_model("nemotron_h").raw | sizes)


@pytest.mark.parametrize(
    "layout",
    [dict(cp=4), pytest.param(dict(tp=2, cp=2, sequence_parallel=True, share_prompts=True), marks=pytest.mark.full)],
    ids=str,
)
def test_ranks_that_share_a_group_take_the_step_of_one_process(layout):
    row = {axis: values[0] for axis, values in AXES.items()} | dict(model="nemotron_h")
    alone = step_of(plainly(config_of(row)), two_groups(), 1)
    found = step_of(config_of(row | layout), two_groups(), ranks(row | layout))
    assert found.disagreement == 0 and largest_excess(found, alone) <= 1


def both_states() -> tuple[dict[str, Any], dict[str, Any]]:
    """The place of every tensor of a mixer in a checkpoint, by our code and by MambaMixer's."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    layout, hf_config = init_layout(ParallelSection(tp=2)), two_groups()
    (chunk,) = build_model(hf_config, layout, ModelOptions(dtype=torch.float32))
    mixer: Any = next(layer.mixer for layer in chunk.decoder.layers if hasattr(layer, "mixer"))
    mixer.d_inner_local_tp, mixer.nheads_local_tp = mixer.rows["z"], mixer.rows["dt"]
    mixer.ngroups_local_tp, mixer.d_state = mixer.sizes.groups // 2, mixer.sizes.state_dim
    found = places(mixer.sharded_state_dict("mixer.")), places(MambaMixer.sharded_state_dict(mixer, "mixer."))
    layout.close()
    return found


def places(state: dict[str, Any]) -> dict[str, Any]:
    """Key in the checkpoint -> (whole shape, offset of this rank's part)."""
    parts = [part for entry in state.values() for part in (entry.build() if hasattr(entry, "build") else [entry])]
    return {part.key: (part.global_shape, part.global_offset) for part in parts if hasattr(part, "global_shape")}


def test_a_checkpoint_has_the_keys_and_parts_of_megatron_cores_mixer():
    for own, theirs in run_ranks(both_states, 2):
        assert own == theirs and {"mixer.in_proj.weight.z", "mixer.conv1d.bias.B", "mixer.norm.weight"} <= own.keys()
