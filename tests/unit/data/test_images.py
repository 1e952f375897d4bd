"""Images of rows: columns and parts as in TRL, their tokens, and pixels that are computed at each access."""

import base64
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megagrpo.config import DataSection, load_config
from megagrpo.data.images.prompt_images import ImageReader, storable
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.weights.bridge.image_facts import processor_of
from tests.distributed.tiny_vision import CHARACTERS, SPECIAL, image, write_model
from tests.unit.families.published_configs import MORE, published
from tests.unit.for_each import for_each

IMAGE = len(CHARACTERS) + SPECIAL.index("<|image_pad|>")  # its token id


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        yield Path(name)


def png(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def source(folder: Path, path: Path, limit: int = 200, **section) -> PromptSource:
    tokenizer = load_tokenizer(folder)
    tokenizer.images = ImageReader(folder, IMAGE, 2)
    data = DataSection(train=dict(source=str(path)), images=True, shuffle=False, **section)
    return PromptSource(data.train, data, tokenizer, limit, 0)


def parquet(path: Path, rows: list[dict], **features) -> Path:
    import datasets

    data = datasets.Dataset.from_list(rows)
    for name, feature in features.items():
        data = data.cast_column(name, feature)
    data.to_parquet(str(path / "rows.parquet"))
    return path / "rows.parquet"


def test_a_prompt_has_the_tokens_and_pixels_of_transformers_processor(folder, tmp_path):
    import datasets

    pictures = [image(84, 56, 1), image(30, 100, 2)]
    content = [dict(type="image"), dict(type="text", text="same? "), dict(type="image")]
    rows = [dict(prompt=[dict(role="user", content=content)], images=pictures)]
    path = parquet(tmp_path, rows, images=datasets.List(datasets.Image()))
    (prompt,) = source(folder, path).all()

    from transformers import AutoTokenizer, Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    words = AutoTokenizer.from_pretrained(folder)
    theirs = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor.from_pretrained(folder), words, Qwen2VLVideoProcessor(), chat_template=words.chat_template
    )
    text = theirs.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True)
    expected = theirs(text=[text], images=pictures, return_tensors="pt")
    assert list(prompt.token_ids) == expected["input_ids"][0].tolist()
    assert prompt.inputs["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    np.testing.assert_array_equal(prompt.inputs["pixel_values"], expected["pixel_values"])
    for start, count in zip(prompt.inputs["image_starts"], prompt.inputs["image_tokens"], strict=True):
        assert set(prompt.token_ids[start : start + count]) == {IMAGE}
    assert prompt.messages[0]["content"] == content
    seen = [image.opened() for image in prompt.columns["images"]]
    assert all(np.array_equal(one, other) for one, other in zip(seen, pictures, strict=True))


_NORMAL = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, merge_size=2, temporal_patch_size=2)
# The published preprocessor_config.json of Qwen2-VL and Qwen3-VL.
PUBLISHED = {
    "qwen2_vl": _NORMAL
    | dict(min_pixels=3136, max_pixels=12845056, patch_size=14, image_processor_type="Qwen2VLImageProcessor"),
    "qwen3_vl": _NORMAL
    | dict(size=dict(longest_edge=16777216, shortest_edge=65536), patch_size=16)
    | dict(processor_class="Qwen3VLProcessor", image_processor_type="Qwen2VLImageProcessorFast"),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_size_of_an_image_gives_the_grid_of_the_published_processors(kind, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED[kind]))
    reader = ImageReader(tmp_path, IMAGE, 2)
    for size in ((84, 56), (30, 100), (640, 480)):
        picture = image(*size, 1)
        pixels, grids = reader.pixels([picture])
        assert reader.grid(picture) == tuple(grids[0]) and len(pixels) == grids[0].prod()


@pytest.mark.parametrize("kind", ["bytes", "path", "inline", "string prompt"])
def test_an_image_may_be_bytes_a_path_or_inside_a_message(folder, tmp_path, kind):
    picture = image(56, 56, 3)
    (tmp_path / "one.png").write_bytes(png(picture))
    question = [dict(role="user", content="which?")]
    row = dict(prompt=question, image=dict(bytes=png(picture), path=None))
    if kind == "path":
        row = dict(prompt=question, image="one.png")
    elif kind == "inline":
        parts = [dict(type="image", image="one.png", text=None), dict(type="text", text="which?", image=None)]
        row = dict(prompt=[dict(role="user", content=parts)])
    elif kind == "string prompt":
        row = dict(prompt="which?", image=dict(bytes=png(picture), path=None))
    (prompt,) = source(folder, parquet(tmp_path, [row])).all()
    expected = ImageReader(folder, IMAGE, 2).pixels([picture])[0]
    np.testing.assert_array_equal(prompt.inputs["pixel_values"], expected)
    assert prompt.token_ids.count(IMAGE) == 4
    assert prompt.messages[0]["content"] == [dict(type="image"), dict(type="text", text="which?")]


def test_an_image_in_json_is_base64_or_a_data_url(folder, tmp_path):
    picture, (path, *rows) = image(56, 56, 3), (tmp_path / "rows.jsonl",)
    text = base64.b64encode(png(picture)).decode()
    for value in (dict(bytes=text), "data:image/png;base64," + text):
        rows.append(dict(prompt="which?", image=value))
    rows.append(dict(prompt=[dict(role="user", content=[dict(type="image", image=rows[1]["image"])])]))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = ImageReader(folder, IMAGE, 2).pixels([picture])[0]
    for prompt in source(folder, path).all():
        np.testing.assert_array_equal(prompt.inputs["pixel_values"], expected)
    path.write_text(json.dumps(dict(prompt="which?", image=dict(bytes="no base64!"))))
    with pytest.raises(ValueError, match=r"row 0: .* is not base64: 'no base64!'"):
        source(folder, path)


@pytest.mark.parametrize("is_text", [True, False])
def test_images_replace_the_tags_of_verl_and_ms_swift(folder, tmp_path, is_text):
    pictures = [dict(bytes=png(image(28, 28, seed)), path=None) for seed in (1, 2)]
    texts = ["<image>same as <image>?", "<image><image>", "no tag"]
    prompts = texts if is_text else [[dict(role="user", content=text)] for text in texts]
    rows = [dict(prompt=prompt, images=pictures) for prompt in prompts]
    seen, text = dict(type="image"), lambda words: dict(type="text", text=words)
    expected = [[seen, text("same as "), seen, text("?")], [seen, seen], [seen, seen, text("no tag")]]
    found = source(folder, parquet(tmp_path, rows)).all()
    assert [prompt.messages[0]["content"] for prompt in found] == expected
    assert all(prompt.token_ids.count(IMAGE) == 2 for prompt in found)


def test_a_row_with_pil_images_becomes_one_that_a_checkpoint_can_hold(folder, tmp_path):
    picture = image(56, 56, 3)
    row = storable(dict(prompt=[dict(role="user", content=[dict(type="image", image=picture)])], images=[picture], n=1))
    assert row["n"] == 1 and row["images"] == [dict(bytes=png(picture))]
    assert row["prompt"][0]["content"][0]["image"] == dict(bytes=png(picture))


def test_a_prompt_that_is_rendered_again_keeps_its_images(folder, tmp_path):
    rows = [dict(prompt="which?", images=[dict(bytes=png(image(84, 56, seed)), path=None) for seed in (1, 2)])]
    prompts = source(folder, parquet(tmp_path, rows))
    (prompt,), words = prompts.all(), load_tokenizer(folder)
    longer = [prompt.messages[0] | dict(content=[*prompt.messages[0]["content"], dict(type="text", text=" now")])]
    ids = prompt.inputs.placed(words.render(longer))
    assert len(ids) == len(prompt.token_ids) + 4 and ids.count(IMAGE) == 12
    moved = [dict(role="user", content=[dict(type="text", text="now "), *longer[0]["content"]])]
    with pytest.raises(ValueError, match="renders its images at other places"):
        prompt.inputs.placed(words.render(moved))
    assert prompt.inputs.files() == [png(image(84, 56, seed)) for seed in (1, 2)]


def test_rows_without_images_stay_text(folder, tmp_path):
    rows = [
        dict(prompt="which?", images=[]),
        dict(prompt="which?", images=[dict(bytes=png(image(28, 28, 4)), path=None)]),
    ]
    text, seen = source(folder, parquet(tmp_path, rows)).all()
    assert not text.inputs and text.messages == "which?" and IMAGE not in text.token_ids
    assert seen.token_ids.count(IMAGE) == 1


def test_equal_questions_about_other_images_are_not_repeated(folder, tmp_path):
    one, other = (dict(bytes=png(image(28, 28, seed)), path=None) for seed in (5, 6))
    prompts = source(folder, parquet(tmp_path, [dict(prompt="a", image=picture) for picture in (one, other, one)]))
    assert prompts.repeated() == [(2, 0)]


def test_only_whole_equal_files_are_repeated_images(folder, tmp_path):
    """Two files of 270 kB that differ in one pixel of the middle, as paths and as bytes."""
    pixels = np.zeros((300, 300, 3), np.uint8)
    for name, gray in (("one", 0), ("other", 1), ("copy", 0)):
        pixels[150, 150] = gray
        Image.fromarray(pixels).save(tmp_path / f"{name}.bmp")
    content = base64.b64encode((tmp_path / "one.bmp").read_bytes()).decode()
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps(dict(prompt="a", image=value)) + "\n" for value in ("one.bmp", "other.bmp", content, "copy.bmp")
        )
    )
    prompts = source(folder, tmp_path / "rows.jsonl", limit=300)
    assert prompts.repeated() == [(2, 0), (3, 0)]
    assert prompts.shared_with(prompts.sample(4)) == [(0, 0), (1, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize("columns", [1, 0])
def test_base64_of_a_row_is_decoded_once(folder, tmp_path, monkeypatch, columns):
    lengths, decode = [], base64.b64decode
    monkeypatch.setattr(base64, "b64decode", lambda text, **more: lengths.append(len(text)) or decode(text, **more))
    text = base64.b64encode(png(image(56, 56, 3))).decode()
    row = dict(prompt="which?", image=text)
    if not columns:
        row = dict(prompt=[dict(role="user", content=[dict(type="image", image=text)])])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    prompts = source(folder, tmp_path / "rows.jsonl")
    assert sum(length > 100 for length in lengths) == 1  # others look at how the text begins
    (prompt,) = prompts.all()
    assert sum(length > 100 for length in lengths) == 2
    assert prompt.inputs.files() == [png(image(56, 56, 3))] and prompt.inputs["pixel_values"].shape[0]
    assert sum(length > 100 for length in lengths) == 2


def test_an_image_is_turned_as_its_exif_says(folder, tmp_path):
    exif = Image.Exif()
    exif[274] = 6  # turned by 90 degrees
    out = io.BytesIO()
    image(84, 28, 7).save(out, "JPEG", exif=exif)
    (prompt,) = source(folder, parquet(tmp_path, [dict(prompt="a", image=dict(bytes=out.getvalue(), path=None))])).all()
    assert prompt.inputs["image_grid_thw"].tolist() == [[1, 6, 2]]
    assert len(prompt.inputs["pixel_values"]) == 12


@for_each(
    ("row", "said"),
    [
        (
            dict(prompt="a", image=dict(bytes=b"none", path=None)),
            "has an image that is in none of the formats PNG, JPEG",
        ),
        (dict(prompt="a", image="missing.png"), "has an image that is neither a file nor base64 .* 'missing.png'"),
        (dict(prompt="a <|image_pad|>", image="one.png"), r"renders 2 image token\(s\) for 1 image\(s\)"),
        (dict(prompt="a", image="one.png", images=["one.png"]), "goes with both columns image and images; keep one"),
        (dict(prompt="a", images="one.png"), "column images, which must be a list"),
        (dict(prompt="a", images=dict(path="one.png")), r"column images, which must be a list \(got dict\)"),
        (dict(prompt="a", image=["one.png"]), "column image, which must hold one image"),
        (dict(prompt="a", image="tall.png"), r"has an image of 2 x 500 pixels \(absolute aspect .*; crop it"),
        (dict(prompt="<video>a", videos=["a.mp4"]), "goes with column videos, which no supported model reads"),
        (
            dict(prompt=[dict(role="user", content=[dict(type="image"), dict(type="image")])], images=["one.png"]),
            r"has 2 parts of type image, and the row has 1 image\(s\)",
        ),
        (
            dict(prompt=[dict(role="user", content=[dict(type="image", image="one.png")])], image="one.png"),
            "has images both in messages and in a column",
        ),
    ],
)
def test_what_is_wrong_with_an_image_is_told_with_its_row(folder, tmp_path, row, said):
    (tmp_path / "one.png").write_bytes(png(image(28, 28, 8)))
    (tmp_path / "tall.png").write_bytes(png(image(2, 500, 8)))
    with pytest.raises(ValueError, match=f"data.train: row 0: .*{said}"):
        source(folder, parquet(tmp_path, [row]))


def test_overlong_prompts_are_dropped_whole(folder, tmp_path):
    rows = [dict(prompt="a", image=dict(bytes=png(image(size, 56, 9)), path=None)) for size in (28, 112)]
    prompts = source(folder, parquet(tmp_path, rows), limit=10)
    assert list(prompts.rows) == [0] and prompts.num_overlong == 1


def test_a_model_without_a_tower_for_images_is_refused(folder):
    config = load_config("megagrpo:quickstart", ["data.images=true"])
    text = parse_hf_config(published("Qwen3 4B"))
    with pytest.raises(
        ValueError, match=r"^data.images: .* is a model of text; set it to false, or see docs/vision.md"
    ):
        processor_of(config, folder, text)
    with pytest.raises(ValueError, match=r"is a llava, trained on text only; set it to false"):
        processor_of(config, folder, parse_hf_config(MORE["LLaVA 1.5 7B"]))
    assert processor_of(config, folder).images.token_id == IMAGE
