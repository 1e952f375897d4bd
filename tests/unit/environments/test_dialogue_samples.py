"""Multi-turn responses as samples, metrics, rewards and rows of files: tokens not written by the policy never count."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tiny_policy import tiny_run

from megagrpo.algorithms.advantages import advantages_of, to_samples
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import AlgorithmSection, RewardFunction, RewardsSection
from megagrpo.data.packing.sample_packing import UNLIMITED, PackingRules, pack
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.completions import completion_row
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.train_types import LossInputs
from megagrpo.trainer.rollout.collector import numbered
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn

MESSAGES = (
    {"role": "assistant", "content": "ask"},
    {"role": "tool", "name": "calculator", "content": "9"},
    {"role": "assistant", "content": "it is 9"},
)


def dialogue(written, calls=(), failures=0, turn_rewards=(None, None), **more):
    first = Turn(0, 1, turn_rewards[0], calls, failures)
    return Dialogue(tuple(written), MESSAGES, (first, Turn(1, 2, turn_rewards[1])), ended="done", **more)


def rollout(response, written=None, prompt=(1, 2), **more):
    logprobs = tuple(-0.5 - i / 10 if own else 0.0 for i, own in enumerate(written or [True] * len(response)))
    told = None if written is None else dialogue(written, **more)
    return Rollout(Prompt(0, prompt, "hi"), tuple(response), logprobs, "stop", 3, "ask 9 it is 9", told)


HOLES = rollout([7, 8, 20, 21, 9, 5], [True, True, False, False, True, True], calls=("f", "g"), failures=1)
PLAIN = rollout([7, 6, 5])
FIRST_FOREIGN = rollout([20, 21, 7], [False, False, True])


def scored(*rollouts):
    return [ScoredRollout(r, {"f": float(i)}, float(i)) for i, r in enumerate(rollouts)]


def test_samples_mask_what_others_wrote():
    sample = to_samples(scored(HOLES), torch.ones(1, 1))[0]
    assert sample.token_ids.tolist() == [1, 2, 7, 8, 20, 21, 9, 5]
    assert sample.response_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert sample.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.5, -0.6, 0, 0, -0.9, -1.0])


@pytest.mark.parametrize(
    "rules", [UNLIMITED, PackingRules(max_tokens=8), PackingRules(max_tokens=24, align=4, sequence_align=4)], ids=str
)
@pytest.mark.parametrize("share", [False, True])
def test_loss_tokens_and_counts_are_the_policys_however_they_are_packed(rules, share):
    samples = to_samples(scored(HOLES, PLAIN, FIRST_FOREIGN), torch.tensor([[1.0, 2.0, 3.0]]))
    rules = PackingRules(**vars(rules) | dict(share_prompts=share))
    batch = pack(samples, rules)
    found = [
        pair
        for m in batch.micro_batches
        for pair in zip(m.labels[m.loss_mask].tolist(), m.advantages[m.loss_mask].tolist(), strict=True)
    ]
    assert sorted(found) == sorted([(7, 1.0), (8, 1.0), (9, 1.0), (5, 1.0), (7, 2.0), (6, 2.0), (5, 2.0), (7, 3.0)])
    assert (batch.num_tokens, batch.num_sequences) == (8, 3)
    behind = {}  # the policy's context before each of its tokens
    for m in batch.micro_batches:
        sequences = m.samples.repeat_interleave(m.cu_seqlens.diff().long())
        for place in m.loss_mask.nonzero()[:, 0].tolist():
            behind[int(sequences[place]), int(m.position_ids[place]) + 1] = int(m.token_ids[place])
    assert behind == {(0, 2): 2, (0, 3): 7, (0, 6): 21, (0, 7): 9, (1, 2): 2, (1, 3): 7, (1, 4): 6, (2, 4): 21}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "gmpo", "vespo"])
def test_the_loss_is_that_of_the_tokens_alone(loss_type):
    """The same numbers as for samples with only the policy's tokens."""
    config = tiny_run(algorithm=dict(loss_type=loss_type, beta=0.1, importance_correction="token_truncate"))

    def loss(rollouts):
        batch = pack(to_samples(scored(*rollouts), torch.tensor([[1.5, -0.5]])), UNLIMITED)
        (m,) = batch.micro_batches
        # log-probs of other tokens are arbitrary
        tags = torch.where(m.loss_mask, m.rollout_logprobs, torch.randn(m.num_tokens))
        policy = (tags + 0.1 * torch.sin(40 * tags)).requires_grad_()
        batch = batch.with_terms(old_logprobs=[tags + 0.01], ref_logprobs=[tags - 0.2])
        output = make_loss(config.algorithm)(LossInputs(policy, tags.abs(), batch.micro_batches[0]))
        output.numerator.backward()
        metrics = {name: [metric.sum.item(), metric.count.item()] for name, metric in output.metrics.items()}
        value = output.numerator.item() / denominator(batch, config.algorithm.loss.average, 16)
        return value, metrics, policy.grad[m.loss_mask], policy.grad[~m.loss_mask]

    bare = Rollout(HOLES.prompt, (7, 8, 9, 5), tuple(v for v in HOLES.rollout_logprobs if v), "stop", 3, "x")
    found, expected = loss([HOLES, PLAIN]), loss([bare, PLAIN])
    assert found[0] == pytest.approx(expected[0], rel=1e-6) and not found[3].any()
    torch.testing.assert_close(found[2], expected[2], rtol=1e-6, atol=0)
    for name, pair in expected[1].items():
        assert found[1][name] == pytest.approx(pair, rel=1e-5), name


def test_a_conversations_time_is_divided_into_slots_generation_and_tools():
    turns = Turn(0, 2, generated=3.0, answered=4.0, queued=1.0), Turn(4, 6, generated=0.5, answered=0.5)
    timed = replace(HOLES, dialogue=replace(HOLES.dialogue, turns=turns))
    metrics = rollout_metrics(StepSamples.of(scored(timed, PLAIN)))
    shares = {name: metrics[f"idle/{name}"] for name in ("slots", "generation", "tools")}
    assert shares == pytest.approx({"slots": 1 / 8, "generation": 2.5 / 8, "tools": 4.5 / 8})
    assert [metrics[f"multi_turn/turn_seconds/{name}"] for name in ("mean", "max")] == [1.75, 3.0]
    assert [metrics[f"multi_turn/tool_seconds/{name}"] for name in ("mean", "max")] == [2.25, 4.0]
    assert metrics["multi_turn/turn_tokens"] == 2
    assert metrics["multi_turn/ended/done"] == 1.0
    untimed = rollout_metrics(StepSamples.of(scored(HOLES)))
    assert "idle/tools" not in untimed and untimed["multi_turn/turn_seconds/mean"] == 0.0


def test_lengths_count_the_policys_tokens_and_num_tokens_all():
    metrics = rollout_metrics(StepSamples.of(scored(HOLES, PLAIN, FIRST_FOREIGN)))
    assert [metrics[f"completions/{name}_length"] for name in ("min", "mean", "max")] == [1, 8 / 3, 4]
    assert metrics["num_tokens"] == 8 + 5 + 5
    assert (metrics["multi_turn/mean_turns"], metrics["multi_turn/failures"]) == (2, 0)
    assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (1.0, 0.5)
    assert not any(
        name.startswith(("tools/", "multi_turn/")) for name in rollout_metrics(StepSamples.of(scored(PLAIN)))
    )


REWARD = """
def seen(completions, completion_ids, **columns):
    return [float(completion == expected and ids == own) for completion, ids in zip(completions, completion_ids)]
"""


@pytest.mark.parametrize("conversational", [False, True])
def test_reward_functions_get_the_messages_and_the_policys_tokens(tmp_path, conversational):
    expected = list(MESSAGES) if conversational else "it is 9"
    (tmp_path / "r.py").write_text(f"expected, own = {expected!r}, [7, 8, 9, 5]\n" + REWARD)
    prompt = Prompt(0, (1, 2), [{"role": "user", "content": "hi"}] if conversational else "hi")
    given = Rollout(prompt, HOLES.response_ids, HOLES.rollout_logprobs, "stop", 3, HOLES.text, HOLES.dialogue)
    with RewardScorer(
        RewardsSection(functions=[RewardFunction(function=f"{tmp_path}/r.py:seen")], workers=1), 16
    ) as scorer:
        assert scorer.score([given])[0].rewards == {"seen": 1.0}


def test_rewards_of_turns_and_environments_are_columns_of_weight_one():
    told = rollout([7, 8], [True, True], rewards={"turns": 0.25, "Board": None}, turn_rewards=(0.5, -0.25))
    functions = [RewardFunction(function="format", weight=3.0)]
    with RewardScorer(RewardsSection(functions=functions, workers=1), 16) as scorer:
        (found,) = scorer.score([told])
    assert found.rewards == {"format": 0.0, "turns": 0.25, "Board": None} and found.reward == 0.25
    algorithm = AlgorithmSection(multi_objective_aggregation="normalize_then_sum")
    group = [ScoredRollout(told, {"format": 0.0, "turns": value}, value) for value in (1.0, 2.0, 3.0)]
    samples = StepSamples.of(group)
    tables = samples.rewards(3), samples.rewards_by_function(3)
    advantages = advantages_of(*tables, algorithm, [1.0]).flatten().tolist()
    assert advantages[0] == -advantages[2] < advantages[1] == 0 and not any(map(math.isnan, advantages))


NO_CALLS = {
    "calls": [],
    "failures": 0,
    "shortened": 0,
    "finish_reason": "stop",
    "generated": 0.0,
    "began": 0.0,
    "answered": 0.0,
    "queued": 0.0,
}


def test_completions_keep_the_messages_the_turns_and_their_rewards():
    told = rollout([7, 20, 8], [True, False, True], turn_rewards=(0.5, None), rewards={"turns": 0.5})
    row = json.loads(json.dumps(completion_row(1, scored(told)[0], 1.0)))
    assert row["num_tokens"] == 2
    assert row["dialogue"] == {
        "messages": list(MESSAGES),
        "turns": [
            {"start": 0, "stop": 1, "reward": 0.5, **NO_CALLS},
            {"start": 1, "stop": 2, "reward": None, **NO_CALLS},
        ],
        "ended": "done",
        "rewards": {"turns": 0.5},
        "cause": "",
        "retries": 0,
        "counts": {},
    }


def test_completions_say_where_a_branch_leaves_its_trajectory():
    main, opening = rollout([7, 20, 8], [True, False, True]), {"role": "user", "content": "hi"}
    told = {"role": "user", "content": "In short: 9."}
    context = replace(main.prompt, messages=[opening, MESSAGES[0], told])
    branch = replace(main, prompt=context, dialogue=replace(main.dialogue, messages=(MESSAGES[2],)))
    (row,) = completion_row(1, scored(replace(main, branches=(branch,)))[0], 1.0)["branches"]
    assert row["shared_messages"] == 2 and row["prompt"] == [told]
    assert row["dialogue"]["messages"] == (MESSAGES[2],)


def test_a_prompt_that_comes_again_is_told_apart_before_replicas_share_the_prompts():
    asked = [Prompt(i, (1,), "") for i in (7, 3, 7, 7, 3)]
    assert [prompt.occurrence for prompt in numbered(asked)] == [0, 0, 1, 2, 1]
    assert [prompt.prompt_id for prompt in numbered(asked)] == [7, 3, 7, 7, 3]
