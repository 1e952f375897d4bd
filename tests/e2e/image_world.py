"""Runs with images: a tiny random Qwen2.5-VL, questions about pictures of several sizes, and one vLLM server that all
runs share."""

from __future__ import annotations

import functools
from pathlib import Path

from ranks import run_ranks
from transformers import AutoTokenizer

from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from tests.distributed.tiny_vision import image, write_model
from tests.e2e import world

SIZES = [(84, 56), (30, 100), (56, 56), (28, 28)]
ROWS = 24
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
REWARDS = '''
"""Rewards that see the pictures."""


def early(completions, image, width, **columns):
    """Share of letters before n. Each completion gets the picture of its row."""
    assert [one.width for one in image] == width, (image, width)
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(character < "n" for character in text) / max(1, len(text)) for text in texts]
'''


def row(number: int) -> dict:
    """The columns of a row, with a PIL image."""
    size = SIZES[number % len(SIZES)]
    return dict(prompt=f"what is it {number}?", image=image(*size, number), width=size[0])


@functools.cache
def folder() -> Path:
    """The folder with model/, train.parquet and rewards.py."""
    import datasets

    made = world.folder() / "images"
    run_ranks(write_model, 1, made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "model")
    rows = datasets.Dataset.from_list([row(number) for number in range(ROWS)])
    rows.cast_column("image", datasets.Image()).to_parquet(str(made / "train.parquet"))
    (made / "rewards.py").write_text(REWARDS)
    return made


@functools.cache
def server() -> str:
    """The address of a vLLM server on the model."""
    options = ServerOptions(
        str(folder() / "model"), "float32", 160, max_num_seqs=64, kv_cache_gb=0.25, omp_threads=1, images=True
    )
    launcher = Launcher(options, world.folder() / "image_server")
    launcher.start()
    return launcher.wait()[0]


def words(*overrides: str) -> list[str]:
    """The overrides of a run with images."""
    made = folder()
    own = [
        f"model.path={made}/model",
        f"data.train.source={made}/train.parquet",
        "data.images=true",
        f"rewards.functions.0.function={made}/rewards.py:early",
        "rollout.max_prompt_length=72",
        "rollout.max_completion_length=16",
        f"rollout.urls=[{server()}]",
        "algorithm.beta=0",
        *overrides,
    ]
    return own


def train(output: Path, *overrides: str) -> world.Run:
    """A run into `output`/run from start to end."""
    return world.train(output, *words(*overrides), launched=True)
