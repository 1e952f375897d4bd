"""The sizes of towers against transformers' classes, without weights."""

import importlib

import pytest
import torch

from megagrpo.families.hf_config import parse_hf_config
from megagrpo.policy.images.image_inputs import SquareTower
from tests.distributed.tiny_vision import KINDS
from tests.family_examples import TINY_SIGLIP
from tests.unit.families.published_configs import MORE
from tests.unit.for_each import for_each

PUBLISHED = ["Qwen2-VL 7B", "Qwen2.5-VL 7B", "Qwen3-VL 8B", "Qwen3-VL 30B A3B", "Qwen3.5 27B", "Qwen3.5 35B A3B"]
PUBLISHED += ["Gemma 3 4B it"]


def raw_config(name: str) -> dict:
    """The config.json of a published model, or of a tiny one with another tower."""
    kind = {MORE[published]["model_type"]: MORE[published] for published in PUBLISHED}
    return MORE[name] if name in MORE else kind[name] | {"vision_config": KINDS[name].tower}


def tower_of(raw: dict, attention: str = "eager") -> torch.nn.Module:
    """transformers' tower of a config.json."""
    from transformers import AutoConfig

    module = importlib.import_module(f"transformers.models.{raw['model_type']}.modeling_{raw['model_type']}")
    vision = parse_hf_config(raw).vision
    config = AutoConfig.for_model(**raw)
    config.vision_config._attn_implementation = attention
    made = getattr(module, vision.tower)
    return SquareTower(config, made) if vision.square else made(config.vision_config)


@for_each("name", [*PUBLISHED, *KINDS])
def test_a_tower_has_the_parameters_of_transformers_class(name):
    raw = raw_config(name)
    with torch.device("meta"):
        tower = tower_of(raw)
    assert parse_hf_config(raw).vision.shape.parameters == sum(parameter.numel() for parameter in tower.parameters())


def operations(raw: dict, pixels: torch.Tensor, grid: list[list[int]]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    tower = tower_of(raw).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(pixels, grid_thw=torch.tensor(grid))
    return counter.get_total_flops()


def test_operations_of_an_image_are_those_that_torch_counts():
    raw, patches = raw_config("qwen3_vl"), 24 * 16
    shape, c = parse_hf_config(raw).vision.shape, raw["vision_config"]
    inside = 3 * c.get("temporal_patch_size", 2) * c.get("patch_size", 16) ** 2
    expected = operations(raw, torch.randn(patches, inside), [[1, 24, 16]])
    assert shape.flops(patches, patches / 4) == pytest.approx(expected, rel=0.02)


def test_operations_of_several_images_of_one_size_are_those_that_torch_counts():
    tower = TINY_SIGLIP | dict(image_size=128, vision_use_head=False)
    raw = raw_config("gemma3") | dict(vision_config=tower, mm_tokens_per_image=64)
    patches, images = (128 // tower["patch_size"]) ** 2, 3
    expected = operations(raw, torch.randn(images, 3, 128, 128), [[1, 1, 1]] * images)
    assert parse_hf_config(raw).vision.shape.flops(images * patches, images * 64) == pytest.approx(expected, rel=0.02)


def kept_bytes(tower: torch.nn.Module, pixels: torch.Tensor, grid: list[list[int]]) -> int:
    """Bytes that a pass keeps for its backward pass, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(pixels, grid_thw=torch.tensor(grid))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


SMALL = dict(depth=4, num_heads=4, embed_dim=256, hidden_size=256, intermediate_size=512, out_hidden_size=256)


@pytest.mark.parametrize("name", ["Qwen2-VL 7B", "Qwen2.5-VL 7B", "Qwen3-VL 8B", "Gemma 3 4B it"])
def test_a_block_keeps_what_the_plan_counts_per_patch(name):
    """For two numbers of blocks, so that what is kept before and after the blocks does not count."""
    raw, found, shapes = raw_config(name), [], []
    square = raw["model_type"] == "gemma3"
    for blocks in (2, 4):
        sizes = SMALL | dict(depth=blocks, num_hidden_layers=blocks, num_attention_heads=4, image_size=224)
        sizes |= {} if name == "Qwen2-VL 7B" else dict(fullatt_block_indexes=[1], deepstack_visual_indexes=[0])
        sized = raw | dict(vision_config=raw["vision_config"] | sizes, mm_tokens_per_image=64)
        shapes.append(parse_hf_config(sized).vision.shape)
        tower = tower_of(sized, "sdpa").to(torch.bfloat16)
        patch = 3 * 224 * 224 if square else tower.patch_embed.proj.weight[0].numel()
        pixels = torch.randn(1, 3, 224, 224) if square else torch.randn(256, patch)
        found.append(kept_bytes(tower, pixels.bfloat16(), [[1, 16, 16]]) / 256 / 2)
    assert shapes[1].blocks - shapes[0].blocks == 2
    assert 2 * shapes[0].kept == pytest.approx(found[1] - found[0], rel=0.02)
