"""PPO's critic: GAE against the naive recursion, the same step in every layout, and a checkpoint that holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run

from megagrpo.algorithms.gae import estimates, last_tokens, turn_ends
from megagrpo.data.packing.sample_packing import build_micro_batch, pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.critic import Critic
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights, whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainSample, TrainState

CRITIC = dict(advantage_estimator="gae", critic=dict(gae_lambda=0.9, critic_lambda=1.0, gamma=0.97, learning_rate=1e-2))


def made(parallel: dict, **algorithm):
    return tiny_run(parallel, algorithm=CRITIC | algorithm, train=dict(max_grad_norm=0.0))


def judged_step(folder, parallel: dict, algorithm: dict, model: str, restarts: bool):
    """A sample's advantages, returns and values after two steps of the critic, and its weights."""
    config, hf_config = made(parallel, **algorithm), tiny_model(model)
    layout = init_layout(config.parallel)
    samples = [replace(s, advantage=float(s.index % 3)) for s in few_samples()]

    def built() -> Critic:
        critic = Critic(config, layout, hf_config)
        fill_weights(critic, hf_config, layout)
        critic.weights_changed()
        return critic

    critic = built()
    for step in range(2):
        if restarts and step == 1:
            (folder / "config.json").write_text("{}")
            policy = MegatronPolicy(config, layout, hf_config)
            fill_weights(policy, hf_config, layout)
            policy.weights_changed()
            saver = Checkpointer(folder / "saved", layout, policy, 1, folder, critic=critic)
            save_now(saver, TrainState(step=1))
            critic = built()
            again = Checkpointer(folder / "saved", layout, policy, 1, folder, critic=critic)
            again.load(newest_checkpoint(saver.folder))
        rules = packing_rules(config, critic.shares_prompts)
        batch = pack(samples, rules, layout.dp_rank, layout.dp_size)
        (batch,), metrics = critic.judged([batch])
        metrics |= {name: metric.value for name, metric in critic.learn(batch).items()}
    rows = {}
    for m in batch.micro_batches if layout.is_last_stage else ():
        for sequence, sample in enumerate(m.samples.tolist()):
            own = m.loss_mask & (m.sequence_index == sequence)
            if sample >= 0 and own.any():
                rows[sample] = torch.stack([m.advantages[own], m.terms.returns[own], m.terms.values[own]])
    return rows, metrics, whole_tensors(critic, hf_config, layout, lambda p: p.data)[0]


def naive(rewards: list[float], values: list[float], ends: list[bool], gamma: float, weight: float) -> list[float]:
    """The definition: the sum over later steps of (gamma lambda)^k times their error, in double precision."""
    found, count = [], len(values)
    errors, factors = [], []
    for t in range(count):
        g = gamma if ends[t] else 1.0
        following = values[t + 1] if t + 1 < count else 0.0
        errors.append(rewards[t] + g * following - values[t])
        factors.append(g * (weight if ends[t] else 1.0))
    for t in range(count):
        total, factor = 0.0, 1.0
        for k in range(t, count):
            total += factor * errors[k]
            factor *= factors[k]
        found.append(total)
    return found


@pytest.mark.parametrize(
    ("parallel", "model"),
    usual(
        [
            (dict(tp=2, sequence_parallel=True), "qwen3_untied"),
            (dict(pp=2), "llama_tied"),
            (dict(cp=2), "qwen3_untied"),
            (dict(), "qwen3_moe"),
        ],
        0,
    ),
    ids=str,
)
def test_a_step_of_the_critic_is_that_of_one_process_and_resumes(parallel, model, tmp_path):
    alone, one, weights = run_ranks(judged_step, 1, tmp_path, {}, {}, model, False)[0]
    found = run_ranks(judged_step, 2, tmp_path, parallel, {}, model, True)
    rows = {sample: row for of_rank, _, _ in found for sample, row in of_rank.items()}
    assert rows.keys() == alone.keys() and len(rows) > 2
    for sample, row in rows.items():
        torch.testing.assert_close(row, alone[sample], rtol=1e-3, atol=2e-4)
    assert {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in one.items()} == found[0][1]
    assert one["critic/loss"] > 0 and one["critic/grad_norm"] > 0 and "critic/explained_variance" in one
    assert all((row[2] != 0).any() for row in alone.values())  # the first step has moved the values
    for name, tensor in found[0][2].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algorithm", usual([dict(scale_rewards="none"), {}], 0), ids=str)
def test_advantages_and_returns_are_those_of_the_recursion(algorithm, tmp_path):
    ((rows, _, _),) = run_ranks(judged_step, 1, tmp_path, {}, algorithm, "qwen3_untied", False)
    expected, returns = {}, {}
    for sample, (_, _, values) in rows.items():
        rewards = [0.0] * (len(values) - 1) + [float(sample % 3)]
        ends = [True] * len(values)
        expected[sample] = torch.tensor(naive(rewards, values.tolist(), ends, 0.97, 0.9))
        returns[sample] = torch.tensor(naive(rewards, values.tolist(), ends, 0.97, 1.0)) + values
    if not algorithm:
        everything = torch.cat(list(expected.values())).double()
        mean, deviation = everything.mean(), everything.std(unbiased=False)
        expected = {sample: (row - mean) / deviation for sample, row in expected.items()}
    for sample, (advantages, targets, _) in rows.items():
        torch.testing.assert_close(advantages, expected[sample].float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(targets, returns[sample].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["trajectory", "turn"])
def test_tokens_of_an_environment_take_no_time_and_have_no_say(by):
    # two turns of the policy, an answer of the environment between them and one at the end
    written = [False, True, True, False, False, True, True, True, False]
    tokens, count = torch.arange(2, 11), len(written)
    sample = TrainSample(tokens, torch.tensor(written), torch.zeros(count), 0.0, 0)
    m = build_micro_batch([sample])
    values = torch.where(m.loss_mask, torch.linspace(0.1, 0.9, m.num_tokens), 100.0)  # a critic's noise elsewhere
    ends = turn_ends(m) if by == "turn" else last_tokens(m)
    rewards = torch.where(ends, torch.tensor(2.0), torch.tensor(0.0))
    algorithm = made({}, scale_rewards="none").algorithm.model_copy(update=dict(advantage_by=by))
    found = estimates(m, rewards, values, algorithm)
    own, steps = m.loss_mask, turn_ends(m) if by == "turn" else m.loss_mask
    assert own.sum() == 5 and ends.sum() == (2 if by == "turn" else 1)
    parts = rewards[own].tolist(), values[own].tolist(), steps[own].tolist()
    torch.testing.assert_close(found.advantages[own], torch.tensor(naive(*parts, 0.97, 0.9)))
    torch.testing.assert_close(found.returns[own], torch.tensor(naive(*parts, 0.97, 1.0)) + values[own])
    assert not found.advantages[~own].any() and not found.returns[~own].any()


def test_the_lambda_of_a_long_response_is_nearer_to_one():
    samples = [TrainSample(torch.arange(n), torch.arange(n) > 0, torch.zeros(n), 0.0, i) for i, n in enumerate((5, 9))]
    m = build_micro_batch(samples)
    values = torch.linspace(0.1, 0.9, m.num_tokens)
    algorithm = made({}, critic=dict(length_adaptive_alpha=0.5)).algorithm
    found = estimates(m, torch.where(last_tokens(m), 1.0, 0.0), values, algorithm)
    for sequence, length in enumerate((4, 8)):
        own = m.loss_mask & (m.sequence_index == sequence)
        rewards = [0.0] * (length - 1) + [1.0]
        expected = naive(rewards, values[own].tolist(), [True] * length, 1.0, 1 - 1 / (0.5 * length))
        torch.testing.assert_close(found.advantages[own], torch.tensor(expected))
