"""Whole runs whose generation runs ahead of training, on real vLLM servers."""

import pytest

from tests.e2e import world

AHEAD = ("rollout.max_staleness=1", "algorithm.importance_correction=token_truncate")
STILL = ("train.learning_rate=1e-30",)  # weights that stay as they are
LATE = ("rollout.max_completion_length=40", "rollout.max_num_seqs=4")


def drawn(run):
    """(step, prompt) of every group that was trained on, in order."""
    return [(row["step"], row["prompt_id"]) for row in run.completions[::4]]


def test_a_policy_that_stands_still_gets_the_very_responses_of_a_synchronous_run(tmp_path):
    together, ahead = (world.train(tmp_path / name, "run.max_steps=4", *STILL, *more) for name, more in (("sync", ()), ("ahead", AHEAD)))
    assert together.code == ahead.code == 0, ahead.err
    assert [row["completion"] for row in ahead.completions] == [row["completion"] for row in together.completions]
    assert drawn(ahead) == drawn(together)
    assert [line["staleness/max"] for line in ahead.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert not any(name.startswith(("staleness/", "async/")) for line in together.metrics for name in line)
    assert [line["async/waiting"] + line["async/in_flight"] for line in ahead.metrics] == [4.0, 4.0, 4.0, 0.0]


@pytest.mark.parametrize("in_flight", ["keep", "resume", "wait"])
def test_responses_under_way_live_through_a_sync(tmp_path, in_flight):
    more = (*AHEAD, *LATE, *STILL, "run.max_steps=4", f"rollout.in_flight={in_flight}")
    run = world.train(tmp_path, *more)
    assert run.code == 0, run.err
    spanning = [row for row in run.completions if "later_versions" in row]
    assert bool(spanning) == (in_flight != "wait")
    for row in spanning:
        versions = [row["weight_version"], *(version for _, version in row["later_versions"])]
        assert versions == sorted(set(versions)) and row["num_tokens"] > row["later_versions"][-1][0] > 0
        assert row["step"] - 1 <= versions[0] and versions[-1] <= row["step"]
    assert all(line["staleness/max"] <= 1 and line["token_mult_prob_error"] < 1.001 for line in run.metrics)
