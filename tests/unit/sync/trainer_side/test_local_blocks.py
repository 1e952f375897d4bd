"""Parts of Hugging Face tensors read from a rank's parameters, including computed ones."""

import pytest
import torch

from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import cut
from megagrpo.sync.trainer_side.local_blocks import LocalBlocks
from megagrpo.sync.wire.rank_boxes import RankBoxes
from megagrpo.types import WeightSyncError

UP, GATE = "model.layers.0.up.weight", "model.layers.0.gate.weight"
SHAPE = (8, 6)


class Computed:
    """A stand-in for a parameter whose values are computed at each read."""

    def __init__(self, values):
        self.values, self.times = values, 0

    def detach(self):
        self.times += 1
        return self.values


@pytest.fixture
def fused():
    """Rows 4 to 8 of two tensors, stacked as in Megatron (gate first), and the whole tensors."""
    whole = {name: torch.randn(SHAPE) for name in (GATE, UP)}
    param = Computed(torch.cat([whole[GATE][4:], whole[UP][4:]]))
    blocks = [
        Block(name, SHAPE, cut(SHAPE, 0, 4, 8), (2, 4, 6), axis=0, at=at, count=1) for at, name in enumerate((GATE, UP))
    ]
    return whole, param, [("mlp.linear_fc1.weight", param, blocks)]


def test_parts_are_those_of_the_whole_tensor_and_values_are_computed_once_for_a_layer(fused):
    whole, param, parameters = fused
    local = LocalBlocks(parameters)
    local.go_to(0)
    for name in (GATE, UP, UP):
        assert torch.equal(local.read(name, ((5, 2), (7, 6))), whole[name][5:7, 2:6])
    assert param.times == 1
    local.go_to(1)
    local.go_to(0)
    local.read(UP, cut(SHAPE, 0, 4, 8))
    assert param.times == 2


def test_a_block_that_is_gone_and_a_weight_that_is_no_number_are_named(fused):
    _, param, parameters = fused
    rank_boxes = RankBoxes({name: (SHAPE, {cut(SHAPE, 0, 4, 8): [1]}) for name in (GATE, UP)})
    LocalBlocks(parameters).check(rank_boxes, 1, torch.float32)
    name, _, blocks = parameters[0]
    with pytest.raises(
        WeightSyncError, match=r"model\.layers\.0\.up\.weight was present in the first sync and is missing now"
    ):
        LocalBlocks([(name, param, blocks[:1])]).check(rank_boxes, 1, torch.float32)
    LocalBlocks([(name, param, blocks[:1])]).check(rank_boxes, 0, torch.float32)  # no blocks existed
    param.values[0, 0] = float("nan")
    with pytest.raises(
        WeightSyncError,
        match=r"parameter mlp\.linear_fc1\.weight holds NaN or infinity in its part of model\.layers\.0\.gate",
    ):
        LocalBlocks(parameters).check(None, 1, torch.float32)


def test_a_weight_that_the_engines_dtype_rounds_to_infinity_is_named(fused):
    _, param, parameters = fused
    param.values[0, 0] = torch.finfo(torch.float32).max
    LocalBlocks(parameters).check(None, 1, torch.float32)
    with pytest.raises(WeightSyncError, match=r"parameter mlp\.linear_fc1\.weight holds NaN or infinity"):
        LocalBlocks(parameters).check(None, 1, torch.bfloat16)
