"""A model learns the quickstart's task with every loss. Takes minutes each: `make test-full`, or benchmarks/learning.py
for a table."""

import pytest

from benchmarks.learning import LOSSES, learn
from megagrpo.config import load_config
from megagrpo.config.sections import loss_table


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LOSSES)
def test_the_reward_rises(name, tmp_path):
    learnt = learn(name, tmp_path)
    assert learnt.rises, learnt


def test_every_loss_type_has_its_turn():
    assert {options["loss_type"] for options in LOSSES.values()} == loss_table.LOSSES.keys()
    for options in LOSSES.values():
        load_config("configs/quickstart.yaml", [f"algorithm.{key}={value}" for key, value in options.items()])
