"""PPO's critic: GAE against the naive recursion, the same step in every layout, a checkpoint that holds it, and other
weights than the policy's."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint_now import save_now
from dumped_steps import FUNCTIONS, rollouts
from ranks import run_ranks
from suites import usual
from tiny_policy import few_samples, tiny_model, tiny_run
from trainer_alone import trainer_alone

from megagrpo.algorithms.gae import estimates, last_tokens, turn_ends
from megagrpo.config import ConfigError
from megagrpo.data.packing.sample_packing import build_micro_batch, pack, packing_rules
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.platform.process.progress_hook import SILENT
from megagrpo.policy.critic import Critic
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.proof.verify.verified_step import fill_weights, whole_tensors
from megagrpo.records.checkpoints.checkpoint import Checkpointer, CheckpointError
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.records.rows.recorder import Recorder
from megagrpo.train_types import TrainSample, TrainState
from megagrpo.trainer.policy_update import load_critic
from megagrpo.trainer.run_inputs import ModelFiles
from megagrpo.trainer.teachers import model_files

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


def reward_model(folder, shape: str, labels: int = 1):
    """A reward model of transformers in `folder`; with a score for each token of `few_samples`."""
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**tiny_model(shape).raw | dict(pad_token_id=None, num_labels=labels))
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    scores = {}
    for sample in few_samples() if labels == 1 else ():
        states = model.model(sample.token_ids[None]).last_hidden_state[0]
        before = sample.response_mask.nonzero()[:, 0] - 1  # what a token's value is computed from: the tokens before
        scores[sample.index] = (states @ model.score.weight[0])[before].detach()
    return scores


def values_of_reward_model(folder, parallel: dict, shape: str, lora: dict, layout=None):
    """Values of a critic that starts from the reward model in `folder`, by sample."""
    config = tiny_run(parallel, algorithm=CRITIC | dict(critic=dict(path=str(folder))), lora=lora)
    layout, hf_config = layout or init_layout(config.parallel), tiny_model("llama_tied")
    own = model_files("algorithm.critic.path", str(folder), hf_config, layout, None, True)
    critic = load_critic(config, layout, ModelFiles(folder, hf_config, torch.float32, None, [], own), SILENT)
    batch = pack(few_samples(), packing_rules(config, critic.shares_prompts), layout.dp_rank, layout.dp_size)
    found = {}
    for m, row in zip(batch.micro_batches, critic.logprobs(batch), strict=True):
        for sequence, sample in enumerate(m.samples.tolist()):
            own_tokens = m.loss_mask & (m.sequence_index == sequence)
            if row is not None and sample >= 0 and own_tokens.any():
                found[sample] = row[own_tokens]
    return found


@pytest.mark.parametrize(
    ("parallel", "shape", "lora"),
    usual([(dict(tp=2), "qwen3_untied", {}), (dict(pp=2), "llama_tied", dict(rank=2))], 0),
    ids=str,
)
def test_a_critic_starts_with_the_scores_of_a_reward_model(parallel, shape, lora, tmp_path):
    (scores,) = run_ranks(reward_model, 1, tmp_path / "reward", shape)
    found = run_ranks(values_of_reward_model, 2, tmp_path / "reward", parallel, shape, lora)
    values = {sample: row for of_rank in found for sample, row in of_rank.items()}
    assert values.keys() == scores.keys() and len(scores) > 3
    for sample, row in values.items():
        torch.testing.assert_close(row, scores[sample], rtol=1e-4, atol=1e-5)


def refusals(folder):
    """What is said of bad folders of a critic."""
    said, layout = {}, init_layout(tiny_run().parallel)

    def tried(name, change):
        shutil.copytree(folder / "good", folder / name)
        change(folder / name)
        with pytest.raises((ValueError, ConfigError)) as error:
            values_of_reward_model(folder / name, {}, "qwen3_untied", {}, layout)
        said[name] = str(error.value)

    def rewritten(of, **changes):
        file = of / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    weights = "model.safetensors"
    reward_model(folder / "good", "qwen3_untied")
    reward_model(folder / "labels", "qwen3_untied", 2)
    tried("two scores", lambda of: shutil.copyfile(folder / "labels" / weights, of / weights))
    tried("truncated", lambda of: (of / weights).write_bytes((of / weights).read_bytes()[:-100]))
    tried("missing", lambda of: (of / weights).unlink())
    tried("vocabulary", lambda of: rewritten(of, vocab_size=103))
    tried("architecture", lambda of: rewritten(of, intermediate_size=64))
    return said


def test_bad_weights_of_a_critic_are_named(tmp_path):
    (said,) = run_ranks(refusals, 1, tmp_path)
    assert "score.weight" in said["two scores"] and "a critic needs one score" in said["two scores"]
    assert "has shape (101, 192); config.json implies (103, 192)" in said["vocabulary"]
    assert "config.json implies (64, 192)" in said["architecture"]
    assert "model.safetensors" in said["truncated"] and "missing" in said
    assert all("algorithm.critic.path: " in text for text in said.values())


def warmed_up(folder):
    """Metrics of three steps, of which the first only warms up the critic and the second has a NaN in it, whether each
    has moved the policy, the errors of skipped steps, and the recorded advantages of the last."""
    critic = CRITIC["critic"] | dict(warmup_steps=1)
    config = tiny_run(algorithm=CRITIC | dict(critic=critic, beta=0.0), rewards=dict(functions=FUNCTIONS))
    hf_config, layout, seen = tiny_model("llama_tied"), init_layout(config.parallel), []

    class Seen(Recorder):
        def after_training(self, rollouts):
            seen.append(rollouts.advantages)

    policy, critic = MegatronPolicy(config, layout, hf_config), Critic(config, layout, hf_config)
    for model in (policy, critic):
        fill_weights(model, hf_config, layout)
        model.weights_changed()
    trainer, errors = trainer_alone(config, policy, None, folder, [Seen()]), []
    trainer.learning.critic, trainer.learning.count_skip = critic, lambda error, weights: errors.append(error)
    found, moved, head = [], [], critic.head.weight.data
    for step in range(3):
        before = [p.detach().clone() for p in policy.chunks[0].parameters()]
        if step == 1:
            kept = head.clone()
            head[0, 0] = math.nan
        found.append(trainer.step())
        if step == 1:
            head.copy_(kept)
        moved.append(not all(map(torch.equal, before, policy.chunks[0].parameters())))
        trainer.advance()
    return found, moved, [str(error) for error in errors], seen


def test_a_warm_up_leaves_the_policy_alone_and_a_nan_names_the_critic(tmp_path):
    ((first, second, third), moved, errors, advantages), *_ = run_ranks(warmed_up, 1, tmp_path)
    assert moved == [False, False, True]
    assert not {"loss", "grad_norm", "entropy"} & first.keys() and first["critic/loss"] > 0
    assert "loss" not in second and math.isnan(second["critic/loss"]) and "critic/grad_norm" not in second
    assert len(errors) == 1 and "of the critic; the loss is nan" in errors[0]
    assert {"loss", "grad_norm", "critic/grad_norm"} <= third.keys()
    rewards = {s.reward for s in rollouts()}
    assert len(set(advantages[2])) > 4 and not rewards & set(advantages[2])  # of GAE, not the rewards


def resumed_without(folder):
    """What is said when a run with a critic resumes from a checkpoint without one, and of a step without loss tokens;
    the other way round the policy loads."""
    config, hf_config = made({}), tiny_model("llama_tied")
    layout = init_layout(config.parallel)
    policy, critic = MegatronPolicy(config, layout, hf_config), Critic(config, layout, hf_config)
    for model in (policy, critic):
        fill_weights(model, hf_config, layout)
        model.weights_changed()
    (folder / "config.json").write_text("{}")
    for name, saved, loads in (("without", None, critic), ("with", critic, None)):
        saver = Checkpointer(folder / name, layout, policy, 1, folder, critic=saved)
        save_now(saver, TrainState(step=1))
        try:
            Checkpointer(folder / name, layout, policy, 1, folder, critic=loads).load(newest_checkpoint(saver.folder))
        except CheckpointError as error:
            said = str(error)
    silent = [replace(s, response_mask=torch.zeros_like(s.response_mask)) for s in few_samples()]
    (batch,), found = critic.judged([pack(silent, packing_rules(config, critic.shares_prompts))])
    return said, found, critic.learn(batch)["critic/loss"].value


def test_a_run_that_lacks_its_critic_is_named_and_a_step_without_loss_tokens_is_none(tmp_path):
    ((said, found, loss),) = run_ranks(resumed_without, 1, tmp_path)
    assert "has no critic, unlike this run" in said and "/without/" in said
    assert found == {"critic/value": 0.0, "critic/return": 0.0} and loss == 0
