"""The example `moe`: its script makes the model, and with replay the mismatch is smaller than without."""

import pytest

from tests.e2e.test_examples import EXAMPLES, python, train

SHORT = ("run.max_steps=2", "rollout.num_generations=4")


def run_of(folder, replay: str, *overrides: str):
    (folder / replay).mkdir()
    words = (f"model.path={folder}/model", f"rollout.routing_replay={replay}", *overrides)
    return train("moe", folder / replay, *words).metrics


def mismatches(metrics) -> list[float]:
    return [line["token_mult_prob_error"] - 1 for line in metrics]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_steps_with_replay_have_a_smaller_mismatch_than_without(tmp_path):
    assert "written to" in python(EXAMPLES / "moe" / "make_model.py", tmp_path / "model").stdout
    engine, off = (run_of(tmp_path, replay, *SHORT) for replay in ("engine", "off"))
    assert sum(mismatches(engine)) < sum(mismatches(off)) / 2
    for line in engine:
        by_layer = line["routing/agreement_by_layer"]
        assert list(by_layer) == ["0", "1", "2", "3"] and min(by_layer.values()) == line["routing/agreement_min"]
        assert 0.9 < line["routing/agreement_min"] <= line["routing/agreement"] < 1
    assert not [name for line in off for name in line if name.startswith("routing/")]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_example_learns_with_and_without_replay(tmp_path):
    python(EXAMPLES / "moe" / "make_model.py", tmp_path / "model")
    engine, off = (run_of(tmp_path, replay) for replay in ("engine", "off"))
    for metrics in (engine, off):
        assert len(metrics) == 30 and metrics[0]["reward"] < 0.1 and metrics[-1]["reward"] > 0.6
    assert sum(mismatches(engine)[:10]) < sum(mismatches(off)[:10]) / 3
