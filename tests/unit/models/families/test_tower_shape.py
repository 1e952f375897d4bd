"""The sizes of towers against transformers' classes, without weights."""

import importlib

import pytest
import torch
from transformers import AutoConfig

from megagrpo.models.families.hf_config import parse_hf_config
from tests.distributed.tiny_vision import KINDS
from tests.unit.models.families.more_published_configs import MORE

PUBLISHED = ["Qwen2-VL 7B", "Qwen2.5-VL 7B", "Qwen3-VL 8B", "Qwen3-VL 30B A3B", "Qwen3.5 27B", "Qwen3.5 35B A3B"]


def raw_config(name: str) -> dict:
    """The config.json of a published model, or of a tiny one with another tower."""
    kind = {MORE[published]["model_type"]: MORE[published] for published in PUBLISHED}
    return MORE[name] if name in MORE else kind[name] | {"vision_config": KINDS[name].tower}


@pytest.mark.parametrize("name", [*PUBLISHED, *(kind for kind in KINDS if kind != "gemma3")])  # not in the plan
def test_a_tower_has_the_parameters_of_transformers_class(name):
    raw = raw_config(name)
    vision = parse_hf_config(raw).vision
    module = importlib.import_module(f"transformers.models.{raw['model_type']}.modeling_{raw['model_type']}")
    config = AutoConfig.for_model(raw["model_type"], vision_config=dict(raw["vision_config"])).vision_config
    with torch.device("meta"):
        tower = getattr(module, vision.tower)(config)
    assert vision.shape.parameters == sum(parameter.numel() for parameter in tower.parameters())


def test_operations_of_an_image_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    raw = raw_config("qwen3_vl")
    shape = parse_hf_config(raw).vision.shape
    module = importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")
    config = AutoConfig.for_model("qwen3_vl", vision_config=dict(raw["vision_config"])).vision_config
    config._attn_implementation = "eager"
    tower, patches = module.Qwen3VLVisionModel(config).eval(), 24 * 16
    inside = config.in_channels * config.temporal_patch_size * config.patch_size**2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(torch.randn(patches, inside), grid_thw=torch.tensor([[1, 24, 16]]))
    assert shape.flops(patches, patches / 4) == pytest.approx(counter.get_total_flops(), rel=0.02)
