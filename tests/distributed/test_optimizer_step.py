"""The optimizer step against AdamW in float64: gradient clip, learning-rate schedule, weight decay, bias correction,
epsilon.

Each step runs `policy.train_step`. The oracle takes only the gradient from the trainer, and keeps its own weights and
moments.
"""

import math
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import TrainSection
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.proof.verify.verified_step import prepare, whole_tensors

MODEL = "qwen2_untied"  # has biases
STEPS = 4
ADAM = dict(learning_rate=1e-2, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3)
CASES = {  # ranks, train section
    "clip, warm-up, cosine, weight decay, sharded": (
        2,
        dict(max_grad_norm=0.05, warmup_steps=2, lr_scheduler_type="cosine", min_learning_rate=2e-3, weight_decay=0.3)
        | dict(distributed_optimizer=True),
    ),
    "no clip, linear, weight decay": (
        1,
        dict(max_grad_norm=0.0, lr_scheduler_type="linear", weight_decay=0.1, distributed_optimizer=False),
    ),
}


def naive_rate(step: int, train: TrainSection, total: int) -> float:
    """The learning rate of a step counted from 1, as the config fields describe it."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    gone = (step - train.warmup_steps) / (total + 1 - train.warmup_steps)  # 1 at the step after the last
    left = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * gone)) / 2}[train.lr_scheduler_type]
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * left


def naive_adamw(weights, gradients, train, total):
    """The weights after each step: AdamW (Loshchilov and Hutter 2019), from the unclipped gradients of all steps, by
    tensor name."""
    weights, after = dict(weights), []
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step, found in enumerate(gradients, 1):
        norm = math.sqrt(sum(g.square().sum().item() for g in found.values()))
        clip = min(1.0, train.max_grad_norm / norm) if train.max_grad_norm else 1.0
        for name, w in weights.items():
            g = clip * found[name]
            first[name] = train.adam_beta1 * first[name] + (1 - train.adam_beta1) * g
            second[name] = train.adam_beta2 * second[name] + (1 - train.adam_beta2) * g**2
            mean, square = first[name] / (1 - train.adam_beta1**step), second[name] / (1 - train.adam_beta2**step)
            decay = train.weight_decay if w.dim() > 1 else 0.0  # norms and biases are vectors
            weights[name] = w - naive_rate(step, train, total) * (
                mean / (square.sqrt() + train.adam_epsilon) + decay * w
            )
        after.append(dict(weights))
    return after


def take_steps(train, steps=STEPS):
    """(config, weights before and after each step, gradient of each step, metrics of each step), on rank 0."""
    config = tiny_run(algorithm=dict(beta=0.0, loss_type="dapo"), model=dict(precision="fp32"))
    config = config.model_copy(
        update=dict(
            train=TrainSection.model_validate(config.train.model_dump() | ADAM | train),
            run=config.run.model_copy(update=dict(max_steps=steps)),
        )
    )
    layout, hf = init_layout(config.parallel), tiny_model(MODEL)
    policy, batch, _ = prepare(config, hf, layout, few_samples())
    divisor = denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)

    def whole(part):
        return whole_tensors(policy, hf, layout, part)[0]

    weights, gradients, metrics = [whole(lambda p: p.data)], [], []
    for _ in range(steps):
        policy.backward(batch, make_loss(config.algorithm), divisor)
        gather_gradients(policy.model)
        gradients.append(whole(lambda p: p.main_grad))
        metrics.append(policy.train_step(batch, make_loss(config.algorithm), divisor))
        weights.append(whole(lambda p: p.data))
    layout.release()
    return config, weights, gradients, metrics


@pytest.mark.parametrize("name", usual(CASES, 0))
def test_the_weights_of_four_steps_are_those_of_adamw_in_float64(name):
    ranks, train = CASES[name]
    config, weights, gradients, metrics = run_ranks(take_steps, ranks, train)[0]
    expected = naive_adamw(weights[0], gradients, config.train, STEPS)
    for step, ((before, found), right, said) in enumerate(zip(pairwise(weights), expected, metrics, strict=True), 1):
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients[step - 1].values()))
        assert said["grad_norm"].value == pytest.approx(norm, rel=1e-5)
        assert said["learning_rate"].value == pytest.approx(naive_rate(step, config.train, STEPS), rel=1e-6)
        assert config.train.max_grad_norm < norm / 2, "the clip must matter"
        for tensor, w in right.items():
            rounding = step * 2**-23 * w.norm()  # in float32, once a step
            assert (found[tensor] - w).norm() < 1e-4 * (w - before[tensor]).norm() + rounding, (step, tensor)
