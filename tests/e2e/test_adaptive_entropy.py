"""An adaptive entropy bonus in a run that stops and resumes."""

import pytest

from tests.e2e import world

OPTIONS = (
    "algorithm.use_adaptive_entropy=true algorithm.entropy_coef=0.01 algorithm.entropy_target=100 "
    "algorithm.entropy_coef_max=0.018 algorithm.top_entropy_quantile=0.5"
).split()


@pytest.mark.full
def test_its_weight_sets_in_grows_and_goes_on_from_the_checkpoint(tmp_path):
    first = world.train(tmp_path, *OPTIONS, "run.max_steps=2")
    assert first.code == 0, first.err
    run = world.train(tmp_path, *OPTIONS, "run.max_steps=4", "--resume")
    assert run.code == 0, run.err
    assert [line["entropy_coef"] for line in run.metrics] == pytest.approx([0.0, 0.015, 0.018, 0.018])
    assert all(line["entropy/top"] > line["entropy"] for line in run.metrics)
