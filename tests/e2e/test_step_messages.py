"""What the ranks of a whole training step send each other: no Python objects, and few bytes for each token and sample.

Four real ranks (dp 2 x pp 2) run steps of the world's tiny model, from generation to weight sync, with a stub server."""

from __future__ import annotations

import pytest

from tests.e2e.stub_runs import GROUP, Step, ordinary_step
from tests.message_log import objects

RANKS, PROMPTS = 4, 8
SAMPLES = PROMPTS * GROUP
PER_TOKEN, PER_SAMPLE = 12, 64  # bytes
LENGTHS = (16, 128)  # tokens of a response
TO_THE_WRITER = "megagrpo/records/"  # texts and columns, which go from each leader to rank 0 alone, in parts


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory) -> dict[int, list[Step]]:
    """An ordinary step of each rank, by the length of a response."""
    folder, length = tmp_path_factory.mktemp("steps"), LENGTHS[-1]
    return {length: ordinary_step(folder, length, prompts=PROMPTS)}


def test_an_ordinary_step_sends_no_python_objects(ordinary):
    for steps in ordinary.values():
        assert [objects(step.messages) for step in steps] == [[]] * RANKS


def test_each_rank_moves_at_most_12_bytes_a_token_it_samples_or_trains_and_64_a_sample(ordinary):
    for length, steps in ordinary.items():
        for rank, step in enumerate(steps):
            own = [message for message in step.messages if TO_THE_WRITER not in message.caller]
            tokens = len(step.sampled | step.trained) * step.metrics["num_tokens"] / SAMPLES
            moved, bound = sum(m.sent + m.received for m in own), PER_TOKEN * tokens + PER_SAMPLE * SAMPLES
            assert 0 < moved <= bound, f"rank {rank}, {length} tokens: {moved} bytes, {bound:.0f} allowed"


@pytest.mark.full
def test_an_object_gather_that_is_put_back_is_found_and_grows_with_the_tokens(tmp_path):
    received = []
    for length in LENGTHS:
        for step in ordinary_step(tmp_path, length, prompts=PROMPTS, gathers=True)[:1]:
            (found,) = (message for message in step.messages if message.is_object and "stub_runs" in message.caller)
            assert found.kind == "all_gather_object"
            received.append(found.received)
    assert received[1] > 3 * received[0]
