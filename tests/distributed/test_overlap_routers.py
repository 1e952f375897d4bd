"""With `train.overlap: [experts]` two micro-batches are in flight. Each has its own routes and its own tokens that
count: a step with replayed routes and with losses of routers has the same bits as without overlap."""

from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_overlap import BF16, model_of, settings_of
from test_overlap_grad_reduce import Training
from tiny_policy import few_samples

from megagrpo.families.hf_config import HfConfig
from megagrpo.policy.moe.rank_routed_experts import with_sample_routes
from megagrpo.policy.moe.router_losses import selection_biases
from megagrpo.policy.moe.routing_replay import route_shape
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.proof.verify.shrink import random_routes
from megagrpo.proof.verify.verified_step import whole_tensors

LOSSES = dict(router_aux_loss_coef=0.1)
SEQUENCES = dict(tp=2, ep=2, etp=1, sequence_parallel=True)


def step(settings: Any, model: HfConfig) -> tuple[dict, dict[str, float], list[list[float]]]:
    """Gradients of a step whose routes were given or recorded, its metrics, and the selection biases after it."""
    training, replay = Training(settings, model), settings.rollout.routing_replay
    policy, batch = training.policy, training.batches[0]
    if replay == "engine":
        shape = route_shape(model)
        batch = with_sample_routes(batch, random_routes(few_samples(), shape), training.layout, shape)
    elif replay == "trainer":
        batch = policy.replay.recorded(batch, policy.logprobs)
    metrics = policy.backward(batch, training.loss, batch.num_tokens)
    gather_gradients(policy.model)
    gradients = whole_tensors(policy, model, training.layout, lambda p: p.main_grad)[0]
    metrics |= policy.update()
    values = {name: metric.value for name, metric in metrics.items()}
    return gradients, values, [bias.tolist() for bias in selection_biases(policy.chunks)]


def settings(parallel: dict, overlap: list[str], replay: str, algorithm: dict) -> Any:
    made = settings_of(parallel, overlap, **BF16)
    changed = dict(algorithm=made.algorithm.model_copy(update=algorithm))
    return made.model_copy(update=changed | dict(rollout=made.rollout.model_copy(update=dict(routing_replay=replay))))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "replay", "algorithm"),
    [
        ("qwen3_moe", 2, dict(ep=2), "engine", LOSSES),
        pytest.param("qwen3_moe", 2, dict(ep=2), "trainer", {}, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 4, dict(pp=2, vpp=2, ep=2), "engine", LOSSES, marks=pytest.mark.full),
        pytest.param("qwen3_moe", 4, SEQUENCES, "engine", LOSSES, marks=pytest.mark.full),
        pytest.param(
            *("deepseek_v3", 2, dict(ep=2), "engine", dict(moe_router_bias_update_rate=0.01)),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_step_of_routers_is_that_without_overlap(name, ranks, parallel, replay, algorithm):
    beside, plain = (
        run_ranks(step, ranks, settings(parallel, overlap, replay, algorithm), model_of(name))
        for overlap in (["experts"], [])
    )
    for (gradients, metrics, biases), (known, expected, moved) in zip(beside, plain, strict=True):
        assert metrics == expected and "routing/agreement" in metrics and biases == moved
        assert gradients.keys() == known.keys()
        assert all(torch.equal(gradients[key], tensor) for key, tensor in known.items())
    if replay == "engine":
        assert 0 < plain[0][1]["routing/agreement"] < 1
