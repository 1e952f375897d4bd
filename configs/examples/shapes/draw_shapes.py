"""Draws the pictures of train.parquet and heldout.parquet, one shape each, beside this file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 60, 220)}
SIDE = 56  # pixels


def picture(colour: str, draw_number: random.Random) -> Image.Image:
    """Return a circle, square or triangle of the colour, somewhere on white."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen, size = ImageDraw.Draw(image), draw_number.randint(24, 36)
    x, y = (draw_number.randint(2, SIDE - 2 - size) for _ in range(2))
    kind = draw_number.choice(("circle", "square", "triangle"))
    if kind == "circle":
        pen.ellipse((x, y, x + size, y + size), fill=COLOURS[colour])
    elif kind == "square":
        pen.rectangle((x, y, x + size, y + size), fill=COLOURS[colour])
    else:
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=COLOURS[colour])
    return image


def write_data(out: Path, count: int, seed: int) -> None:
    """Write rows with the columns prompt, image and answer: the first letter of the colour."""
    draw_number, rows = random.Random(seed), list[dict[str, Any]]()
    for _ in range(count):
        colour = draw_number.choice(list(COLOURS))
        prompt = [{"role": "user", "content": "which colour?"}]
        rows.append({"prompt": prompt, "image": picture(colour, draw_number), "answer": colour[0]})
    datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).to_parquet(str(out))


if __name__ == "__main__":
    for name, count, seed in (("train", 256, 0), ("heldout", 64, 1)):
        write_data(Path(__file__).parent / f"{name}.parquet", count, seed)
