"""The pictures of the documentation are those that docs/pictures.py draws, and show the run that README lists."""

import importlib.util
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
IMAGES = REPOSITORY / "docs" / "images"
_SPEC = importlib.util.spec_from_file_location("pictures", REPOSITORY / "docs" / "pictures.py")
PICTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(PICTURES)


def circles(svg: str, kind: str) -> list[tuple[float, float]]:
    """Centers of the circles of a class; the first one belongs to the legend or to the first point."""
    return [
        (float(x), float(y)) for x, y in re.findall(rf'<circle cx="([\d.]+)" cy="([\d.]+)" [^>]*class="{kind}"', svg)
    ]


def drawn(picture, tmp_path) -> str:
    picture.write(tmp_path / "picture.svg")
    return (tmp_path / "picture.svg").read_text()


def test_the_layout_is_the_one_that_the_program_draws(tmp_path):
    assert (IMAGES / "layout.svg").read_text() == drawn(PICTURES.layout(), tmp_path)


def test_the_curve_shows_the_numbers_of_the_listing_in_readme(tmp_path):
    text = (REPOSITORY / "README.md").read_text()
    steps = re.findall(r"^step +(\d+)/\d+ +reward +([\d.]+)", text, re.MULTILINE)
    evaluations = re.findall(r"^evaluation after step (\d+) .*pass@1 +(\d+)%", text, re.MULTILINE)
    rows = [{"step": int(step), "reward": float(reward)} for step, reward in steps]
    rows += [{"step": int(step), "eval/pass@1": int(percent) / 100} for step, percent in evaluations]
    assert len(steps) >= 3 and len(evaluations) == 2
    shown = (IMAGES / "quickstart.svg").read_text()
    for kind in ("dot", "ring"):
        for x, y in circles(drawn(PICTURES.curve(rows), tmp_path), kind):
            assert any(abs(x - a) < 0.01 and abs(y - b) < 1.2 for a, b in circles(shown, kind)), (kind, x, y)


@pytest.mark.parametrize("name", ["layout.svg", "quickstart.svg"])
def test_a_picture_loads_nothing_and_has_a_title(name):
    text = (IMAGES / name).read_text()
    assert (
        "<title>" in text and re.findall(r"https?://(?!www\.w3\.org/2000/svg)|@import|<script|xlink:href", text) == []
    )
