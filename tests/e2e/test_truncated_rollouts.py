"""Training on the tokens that top-p, top-k and min-p keep: trainer, engine and audit use the same distribution."""

import json

import pytest

from tests.e2e import world

RULES = ["rollout.top_p=0.7", "rollout.top_k=100", "rollout.min_p=0.02"]


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    """Two steps with every option that compares log-probs."""
    options = ["algorithm.beta=0.1", "algorithm.num_iterations=2", "debug.dump_steps=[2]"]
    run = world.train(tmp_path_factory.mktemp("truncated"), *RULES, *options)
    assert run.code == 0, run.err
    return run


def test_trainer_and_engine_agree_on_the_truncated_distribution(truncated):
    for line in truncated.metrics:
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        assert line["entropy"] < 5  # log 258 = 5.55 bounds the entropy over all tokens, and a random model is near it


def test_the_audit_agrees_with_a_truncated_step(truncated):
    code, said = world.audit(truncated.folder, "--step", 2, "--json")
    assert code == 0 and json.loads(said)["passed"], said


def test_an_exact_kl_of_truncated_distributions_is_refused(tmp_path):
    run = world.train(tmp_path, RULES[0], "algorithm.beta=0.1", "algorithm.kl_estimator=full_reverse")
    assert (
        run.code == 2
        and "algorithm.kl_estimator: full_reverse needs both distributions over the same tokens, but rollout.top_p"
        in run.err
    )
