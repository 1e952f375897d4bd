"""Images in requests, as vLLM's own code reads them."""

import numpy as np
import torch

from megagrpo.engine.image_features import image_features
from megagrpo.engine.requests import GroupRequest, Request
from megagrpo.types import Prompt, SamplingParams

TOKEN = 43
INPUTS = dict(
    pixel_values=torch.randn(8 + 4, 1176, generator=torch.Generator().manual_seed(0)),
    image_grid_thw=np.array([[1, 2, 4], [1, 2, 2]]),
    image_starts=np.array([1, 4]),
    image_tokens=np.array([2, 1]),
)
IDS = (5, TOKEN, TOKEN, 6, TOKEN, 7)


def test_vllm_reads_each_image_as_it_was_sent():
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    group = GroupRequest(Prompt(0, IDS, "", inputs=INPUTS), 2, SamplingParams(1.0, 8), 3, 0)
    read = GenerateRequest.model_validate_json(Request(group, 1).body("id"))
    assert tuple(read.token_ids) == IDS
    assert [(p.offset, p.length) for p in read.features.mm_placeholders["image"]] == [(1, 2), (4, 1)]
    one, other = mm_kwargs_from_features(read.features)["image"]
    torch.testing.assert_close(one["pixel_values"].data, INPUTS["pixel_values"][:8], atol=0, rtol=0)
    torch.testing.assert_close(other["pixel_values"].data, INPUTS["pixel_values"][8:], atol=0, rtol=0)
    assert [item["image_grid_thw"].data.tolist() for item in (one, other)] == INPUTS["image_grid_thw"].tolist()
    # the fields that vLLM's own processor gives them, by which it joins images of several requests
    assert one["pixel_values"].field.slices == [slice(0, 8, None)] and one["image_grid_thw"].field.keep_on_cpu


def test_equal_images_have_equal_hashes_and_others_differ():
    (first, second), again = image_features(INPUTS)["mm_hashes"]["image"], image_features(dict(INPUTS))
    assert again["mm_hashes"]["image"] == [first, second] and first != second
    changed = dict(INPUTS, pixel_values=INPUTS["pixel_values"] + torch.eye(12, 1176) * 1e-3)
    assert not {first, second} & {*image_features(changed)["mm_hashes"]["image"]}


def test_a_prompt_of_text_asks_as_before():
    group = GroupRequest(Prompt(0, IDS, ""), 1, SamplingParams(1.0, 8), 3, 0)
    assert b"features" not in Request(group, 0).body("id")


def test_vllm_reads_whole_images_as_one_crop_each():
    from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    inputs = dict(INPUTS, pixel_values=pixels, image_grid_thw=np.array([[1, 4, 4]] * 2))
    group = GroupRequest(Prompt(0, IDS, "", inputs=inputs), 1, SamplingParams(1.0, 8), 3, 0)
    items = mm_kwargs_from_features(GenerateRequest.model_validate_json(Request(group, 0).body("id")).features)["image"]
    for index, item in enumerate(items):
        torch.testing.assert_close(item["pixel_values"].data, pixels[index : index + 1], atol=0, rtol=0)
        assert item["num_patches"].data.tolist() == 1 and item["num_patches"].field.keep_on_cpu
        assert item["pixel_values"].field.slices == [slice(index, index + 1, None)] and "image_grid_thw" not in item
