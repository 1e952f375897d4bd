"""The example `shapes`: its script makes the model, and trainer and vLLM agree on the pictures."""

import pytest

from tests.e2e.test_examples import EXAMPLES, python, train

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture
def made(tmp_path):
    assert "written to" in python(EXAMPLES / "shapes" / "make_model.py", tmp_path / "model").stdout
    return f"model.path={tmp_path / 'model'}"


def test_two_steps_agree_with_vllm(made, tmp_path):
    run = train("shapes", tmp_path, made, "run.max_steps=2", "rollout.num_generations=4", "evaluation.steps=0")
    assert len(run.metrics) == 2
    for line in run.metrics:
        assert 1 <= line.get("token_mult_prob_error", 1) < 1.0001


def test_the_example_learns_the_colours(made, tmp_path):
    run = train("shapes", tmp_path, made)
    rewards = [line["reward"] for line in run.metrics if "reward" in line]
    assert len(rewards) == 40 and rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > 0.85
