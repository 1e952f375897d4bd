"""Positions of images on three axes, against vLLM's: also images without text between them, which transformers takes
for one."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megagrpo.data.packing.sample_packing import build_micro_batch
from megagrpo.policy.images.image_inputs import axis_positions
from megagrpo.train_types import TrainSample

IMAGE = 43
GRIDS, STARTS, TOKENS = np.array([[1, 4, 6], [1, 2, 4], [1, 4, 4]]), np.array([2, 8, 11]), np.array([6, 2, 4])
IDS = [1, 2, *[IMAGE] * 8, 3, *[IMAGE] * 4, 5, 6, 7]
CONFIG = SimpleNamespace(
    image_token_id=IMAGE,
    video_token_id=44,
    vision_start_token_id=41,
    vision_end_token_id=42,
    vision_config=SimpleNamespace(spatial_merge_size=2),
)


@pytest.fixture(scope="module")
def features():
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    return [
        MultiModalFeatureSpec(
            data={"image_grid_thw": SimpleNamespace(data=torch.tensor(grid))},
            modality="image",
            identifier=str(start),
            mm_position=PlaceholderRange(offset=int(start), length=int(count)),
        )
        for grid, start, count in zip(GRIDS, STARTS, TOKENS, strict=True)
    ]


@pytest.mark.parametrize("module", ["qwen2_vl.Qwen2VL", "qwen2_5_vl.Qwen2_5_VL", "qwen3_vl.Qwen3VL"])
def test_positions_are_those_of_vllm(module, features):
    name, _, kind = module.partition(".")
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{name}"), f"{kind}ForConditionalGeneration")
    of_vllm = model.__new__(model)  # without weights
    torch.nn.Module.__init__(of_vllm)
    of_vllm.config = CONFIG
    expected, _ = of_vllm.get_mrope_input_positions(IDS, features)
    inputs = dict(image_grid_thw=GRIDS, image_starts=STARTS, image_tokens=TOKENS)
    ids, mask = torch.tensor(IDS), torch.arange(len(IDS)) >= 16
    batch = build_micro_batch([TrainSample(ids, mask, torch.zeros(len(IDS)), 1.0, 0, inputs=inputs)])
    assert torch.equal(axis_positions(batch, merge=2)[:, : len(IDS)], torch.as_tensor(expected))
