"""Images of one size (Gemma 3): tokens and pixels as transformers' processor makes them, and what is refused."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagrpo.config import DataSection
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.hf_config import load_hf_config, parse_hf_config
from megagrpo.families.shared.tower_shape import siglip_tower
from megagrpo.families.shared.vision import Square, Vision
from megagrpo.weights.bridge.image_facts import image_reader
from tests.distributed.tiny_square import SIDE, TOKENS, WINDOW, write_model
from tests.distributed.tiny_vision import image
from tests.unit.families.published_configs import MORE


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        yield Path(name)


def prompt_of(folder: Path, path: Path, row: dict):
    import datasets

    datasets.Dataset.from_list([row]).cast_column("images", datasets.List(datasets.Image())).to_parquet(
        path / "r.parquet"
    )
    tokenizer = load_tokenizer(folder)
    tokenizer.images = image_reader(folder, load_hf_config(folder), tokenizer)
    data = DataSection(train=dict(source=str(path / "r.parquet")), images=True, shuffle=False)
    (prompt,) = PromptSource(data.train, data, tokenizer, 200, 0).all()
    return prompt


# The line breaks of the text before and after an image become one token with those of the processor.
TEXTS = [("", "same?"), ("see\n", "\nsame?"), ("see\n\n", "\n\n\nsame?")]


@pytest.mark.parametrize("texts", TEXTS)
def test_a_prompt_has_the_tokens_and_pixels_of_transformers_processor(folder, tmp_path, texts):
    pictures, (before, after) = [image(84, 56, 1), image(30, 100, 2)], texts
    content = [dict(type="text", text=before), *[dict(type="image")] * 2, dict(type="text", text=after)]
    messages = [dict(role="user", content=content)]
    prompt = prompt_of(folder, tmp_path, dict(prompt=messages, images=pictures))

    from transformers import AutoProcessor

    theirs = AutoProcessor.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True)
    expected = theirs(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    np.testing.assert_array_equal(prompt.inputs["pixel_values"], expected["pixel_values"])
    assert prompt.inputs["pixel_values"].shape == (2, 3, SIDE, SIDE)
    spans = zip(prompt.inputs["image_starts"], prompt.inputs["image_tokens"], strict=True)
    inside = np.concatenate([np.arange(start, start + count) for start, count in spans])
    assert np.flatnonzero(expected["token_type_ids"][0]).tolist() == inside.tolist()
    assert len(inside) == 2 * TOKENS


@pytest.mark.parametrize("token", ["<start_of_image>", "<image_soft_token>"])
def test_tokens_of_images_in_the_text_are_an_error_with_the_row(folder, tmp_path, token):
    row = dict(prompt=f"which? {token}", images=[image(20, 20, 1)])
    with pytest.raises(ValueError, match=r"row 0: the prompt renders .* for 1 image\(s\) of 9 tokens; text of the"):
        prompt_of(folder, tmp_path, row)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (dict(do_pan_and_scan=True), "has do_pan_and_scan; crops of images are not supported"),
        (dict(size=dict(height=32, width=48)), r"has the size {'height': 32, 'width': 48}, but images have"),
    ],
)
def test_other_image_processors_are_refused(tmp_path, keys, said):
    write_model(tmp_path)
    path = next(
        path for name in ("preprocessor_config.json", "processor_config.json") if (path := tmp_path / name).exists()
    )
    raw = json.loads(path.read_text())
    raw.get("image_processor", raw).update(keys)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"^data.images: .*{said}"):
        image_reader(tmp_path, load_hf_config(tmp_path), load_tokenizer(tmp_path))


def test_a_tokenizer_without_the_tokens_of_images_is_refused(folder):
    reader = image_reader(folder, load_hf_config(folder), load_tokenizer(folder))
    with pytest.raises(ValueError, match=r"^data.images: the tokenizer has \['', '<image_soft_token>', "):
        replace(reader, tokens=("", *reader.tokens[1:])).check()


def test_images_longer_than_a_window_are_refused(tmp_path):
    write_model(tmp_path, sliding_window=TOKENS - 1)
    with pytest.raises(
        ValueError, match=r"^data.images: an image has 9 tokens .* more than sliding_window 8; vLLM hides"
    ):
        image_reader(tmp_path, load_hf_config(tmp_path), load_tokenizer(tmp_path))
    assert WINDOW >= TOKENS


def test_images_of_the_releases_have_256_tokens():
    tower = dict(hidden_size=1152, image_size=896, intermediate_size=4304, model_type="siglip_vision_model")
    tower |= dict(num_attention_heads=16, num_hidden_layers=27, patch_size=14, vision_use_head=False)
    vision = parse_hf_config(MORE["Gemma 3 4B it"] | dict(vision_config=tower)).vision
    square = Square(patches=64, pixels=896, begin=255999, end=256000)
    shape = siglip_tower(tower, 2560)
    assert vision == Vision("Gemma3MultiModalProjector", "", 262144, 4, square=square, shape=shape)
    name = (
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias"  # of the releases; transformers 5 leaves a part out
    )
    assert {vision.own_name(name), vision.own_name(f"model.{name}")} == {"vision_tower.encoder.layers.0.mlp.fc1.bias"}
