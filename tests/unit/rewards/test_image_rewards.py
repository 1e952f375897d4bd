"""Reward functions see the images of prompts: upright PIL images in the columns that TRL passes."""

import io
import json

import pytest
from PIL import Image

from megagrpo.config import RewardsSection
from megagrpo.data.images.prompt_images import ImageReader, image_columns
from megagrpo.rewards.arguments import column_of
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rewards.workers.channel import Copies, as_json
from megagrpo.types import Prompt, Rollout
from tests.distributed.tiny_vision import image
from tests.unit.rewards.reward_services import serving

REWARDS = """
import numpy as np
from PIL import Image

def red(completions, image):
    assert len({id(one) for one in image}) == len(completions)  # a function may change its own
    return [float(np.asarray(one.convert("RGB"))[0, 0, 0]) for one in image]

def open_signature(completions, **columns):
    assert all(isinstance(one, Image.Image) for one in columns["image"])
    return [float(one.width) for one in columns["image"]]

def widths(completions, images):
    return [float(sum(one.width for one in row)) for row in images]

def without(completions, answer):
    return [1.0] * len(completions)

async def awaits(completions, image):
    return [float(one.height) for one in image]
"""
PICTURE = image(84, 56, 1)


def png(picture: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", **options)
    return out.getvalue()


def rollouts(values: dict, tmp_path, count: int = 2, images=()) -> list[Rollout]:
    found = ImageReader(tmp_path, 0, 2, tmp_path).images(images or values.get("images", [*values.values()]))
    columns = image_columns(values, found) | {"answer": "a"}
    parts = [dict(type="image"), dict(type="text", text="which?")]
    prompt = Prompt(0, (5,), [dict(role="user", content=parts)], columns)
    return [Rollout(prompt, [6], [-0.5], "stop", 1, text="a") for _ in range(count)]


def scored(tmp_path, names: list, values: dict, **more) -> list[dict]:
    (tmp_path / "mine.py").write_text(REWARDS)
    functions = [dict(function=name if "://" in str(name) else f"{tmp_path}/mine.py:{name}") for name in names]
    with RewardScorer(RewardsSection(functions=functions, workers=1), 8) as scorer:
        found = [s.rewards for s in scorer.score(rollouts(values, tmp_path, **more))]
        assert not scorer.tracebacks, scorer.tracebacks
    return found


@pytest.mark.parametrize("kind", ["pil", "bytes", "relative path", "dict of a path"])
def test_a_function_gets_the_image_of_each_completion(tmp_path, kind):
    (tmp_path / "one.png").write_bytes(png(PICTURE))
    value = {
        "pil": PICTURE,
        "bytes": dict(bytes=png(PICTURE), path=None),
        "relative path": "one.png",
        "dict of a path": dict(bytes=None, path="one.png"),
    }[kind]
    names = ["red", "open_signature", "without", "awaits"]
    expected = dict(red=float(PICTURE.getpixel((0, 0))[0]), open_signature=84.0, without=1.0, awaits=56.0)
    assert scored(tmp_path, names, dict(image=value)) == [expected] * 2


def test_columns_are_named_as_in_the_row_and_images_inside_messages_are_images(tmp_path):
    assert scored(tmp_path, ["widths"], dict(images=[PICTURE, image(28, 28, 2)])) == [dict(widths=112.0)] * 2
    assert scored(tmp_path, ["widths"], {}, images=[PICTURE]) == [dict(widths=84.0)] * 2
    assert image_columns(dict(image=None), []) == dict(image=None)
    assert image_columns(dict(images=[]), []) == dict(images=[])
    assert image_columns(dict(prompt="text"), []) == {}


def test_an_image_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    assert scored(tmp_path, ["awaits"], dict(image=dict(bytes=png(PICTURE, exif=exif), path=None)))[0]["awaits"] == 84


def test_a_group_sends_its_image_once(tmp_path):
    content = png(PICTURE)
    group = rollouts(dict(image=dict(bytes=content, path=None)), tmp_path, count=16)
    column = column_of(group, "image")
    assert isinstance(column, Copies) and len(json.dumps(as_json(column))) < 1.5 * len(content)
    assert column_of(group, "answer") == ["a"] * 16


def test_a_server_gets_data_urls(tmp_path):
    with serving(lambda body: (200, dict(rewards=[0.5] * len(body["completions"])))) as server:
        functions = [dict(function=server.url, args=dict(columns=["image"]))]
        with RewardScorer(RewardsSection(functions=functions, workers=1), 8) as scorer:
            assert [s.reward for s in scorer.score(rollouts(dict(image=PICTURE), tmp_path))] == [0.5, 0.5]
        first, second = server.asked[0]["columns"]["image"]
    assert first == second and first.startswith("data:image/png;base64,")


def test_a_judge_gets_the_images_of_the_prompt(tmp_path):
    verdict = '{"criterion_1": {"criteria_met": true}}'
    with serving(lambda body: (200, dict(choices=[dict(message=dict(content=verdict))]))) as server:
        args = dict(url=server.url, model="judge", criteria=["is true"], explain=False, image_column="images")
        functions = [dict(function="rubric", args=args)]
        pictures = dict(images=[PICTURE, image(28, 28, 2)])
        with RewardScorer(RewardsSection(functions=functions, workers=1), 8) as scorer:
            with pytest.raises(ValueError, match="reward `rubric` needs column `images`"):
                scorer.check_columns(["image"])
            assert [s.reward for s in scorer.score(rollouts(pictures, tmp_path, count=1))] == [1.0]
            assert [s.reward for s in scorer.score(rollouts(dict(images=[]), tmp_path, count=1))] == [1.0]
        parts, text = (body["messages"][0]["content"] for body in server.asked)
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]
    assert "user: [image]which?" in parts[0]["text"] and "user: [image]which?" in text
    assert parts[1]["image_url"]["url"].startswith("data:image/png;base64,")
    with pytest.raises(ValueError, match=r"the run's own policy judges text; name a judge by args\.url"):
        RewardScorer(RewardsSection(functions=[dict(function="rubric", args=args | dict(url=None, judge="policy"))]), 8)


def test_checks_of_rows_get_no_images(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def odd(completions, answer):\n    return [0.0] * len(completions)\n"
        "odd.row_fault = lambda **row: None if sorted(row) == ['answer'] else f'has {sorted(row)}'\n"
    )
    functions = [dict(function=f"{tmp_path}/mine.py:odd")]
    with RewardScorer(RewardsSection(functions=functions, workers=1), 8) as scorer:
        columns = rollouts(dict(image=PICTURE), tmp_path)[0].prompt.columns
        assert scorer.row_faults([columns]) == {"odd": []}


def test_a_report_shows_where_an_image_is_and_not_its_bytes(tmp_path):
    (tmp_path / "one.png").write_bytes(png(PICTURE))
    shown = [repr(rollouts(dict(image=value), tmp_path)[0].prompt.columns["image"]) for value in ("one.png", b"0")]
    assert shown == [f"<image {tmp_path}/one.png>", "<image bytes>"]
