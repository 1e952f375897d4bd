"""Advantages of tokens against the formula of DeepSeekMath's process supervision, token by token in plain Python."""

import math
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.algorithms.advantages import advantages_of, group_advantages, to_samples
from megagrpo.algorithms.token_advantages import with_token_advantages
from megagrpo.config import AlgorithmSection, ConfigError, load_config
from megagrpo.data.packing import UNLIMITED, PackingRules, pack
from megagrpo.data.step_samples import StepSamples
from megagrpo.types import Dialogue, PartRewards, Prompt, Rollout, ScoredRollout

EPSILON, GROUP = 1e-4, 3
TOKEN = AlgorithmSection(advantage_by="token")


def rollout(count, prompt_id=0, written=None, branches=()):
    dialogue = None if written is None else Dialogue(written, (), (), "done")
    ids = range(3, 3 + count)
    return Rollout(Prompt(prompt_id, (1, 2), "?"), [*ids], [-1.0] * count, "stop", 0, "", dialogue, branches=branches)


def scored(made, outcome, *rows):
    """`rows` are the rewards of the tokens of the rollout, then of its branches; None: no reward."""
    tokens = tuple(np.array([math.nan if r is None else r for r in row]) for row in rows)
    total = math.fsum([outcome, *(r for row in rows for r in row if r is not None)])
    return ScoredRollout(made, {"f": total}, total, parts=PartRewards(outcome, tokens=tokens) if rows else None)


def naive(group, algorithm):
    """What each token of the rollout, then of its branches, adds to the trajectory's advantage."""
    known = [r for s in group if s.parts for row in s.parts.tokens for r in row.tolist() if not math.isnan(r)]
    mean, scale = statistics.fmean(known), 1.0
    if algorithm.scale_rewards == "group":
        scale = statistics.stdev(known) + EPSILON
    result = []
    for s in group:
        tokens = s.parts.tokens if s.parts else ()
        ordered = [*tokens[1:], *tokens[:1]]
        flat = [r for row in ordered for r in row.tolist()]
        sums = [sum((r - mean) / scale for r in flat[t:] if not math.isnan(r)) for t in range(len(flat))]
        parts = np.split(np.array(sums) * algorithm.token_advantage_weight, np.cumsum([len(row) for row in ordered]))
        result.append([part.tolist() for part in [*parts[-2:-1], *parts[:-2]]] if tokens else [])
    return result


def two_groups():
    draw = random.Random(5)

    def row(count):
        return [draw.choice([None, 0.0, draw.random(), -draw.random()]) for _ in range(count)]

    branch = rollout(4, written=[True, False, True, True])
    first = [
        scored(rollout(5), 1.0, row(5)),
        scored(rollout(3, branches=(branch, rollout(2))), 0.0, row(3), [0.5, None, 1.0, None], row(2)),
        scored(rollout(4), 0.5),  # its function per token failed
    ]
    return [*first, *(scored(rollout(n, 1), float(n), row(n)) for n in (6, 1, 9))]


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_tokens_have_the_advantages_of_the_formula(scale, weight):
    algorithm = AlgorithmSection(advantage_by="token", scale_rewards=scale, token_advantage_weight=weight)
    step = two_groups()
    found = with_token_advantages(step, GROUP, algorithm)
    wanted = [*naive(step[:GROUP], algorithm), *naive(step[GROUP:], algorithm)]
    for s, rows in zip(found, wanted, strict=True):
        assert [row.dtype for row in s.token_advantages] == [np.float32] * len(rows)
        assert [row.tolist() for row in s.token_advantages] == [pytest.approx(row, abs=1e-6) for row in rows]


def test_rewards_at_the_end_alone_give_the_advantage_of_the_trajectory():
    """One reward per trajectory, at its last token: process supervision is then outcome supervision."""
    rewards = [1.0, 0.0, 0.25]
    step = [scored(rollout(n), 0.0, [None] * (n - 1) + [r]) for n, r in zip((4, 2, 7), rewards, strict=True)]
    found = with_token_advantages(step, GROUP, TOKEN)
    outcome = group_advantages(torch.tensor([rewards]), "group")
    for s, advantage in zip(found, outcome.flatten().tolist(), strict=True):
        assert s.token_advantages[0].tolist() == pytest.approx([advantage] * len(s.rollout.response_ids), rel=1e-6)


def packed(step, rules):
    samples = StepSamples.of(with_token_advantages(step, GROUP, TOKEN))
    advantages = advantages_of(samples.outcomes(GROUP), samples.rewards_by_function(GROUP), TOKEN, [])
    of_samples = dict(enumerate(to_samples(step, advantages)))
    for index, sample in of_samples.items():
        if samples.every.own[index].token_advantages:
            row = np.append(np.zeros(2, np.float32), samples.every.own[index].token_advantages[0])
            of_samples[index] = replace(sample, token_advantages=torch.from_numpy(row))
    changed = samples.with_token_advantages(of_samples, advantages.flatten().numpy())
    largest = samples.largest_advantages(advantages.flatten().numpy(), None)
    whole = [replace(s, advantage=float(a)) for s, a in zip(changed.values(), largest, strict=True)]
    return samples, advantages.flatten().tolist(), pack(whole, rules)


def test_labels_carry_the_sum_of_both_advantages():
    step = two_groups()
    samples, outcome, batch = packed(step, UNLIMITED)
    (m,) = batch.micro_batches
    every = [*step, *(branch for s in step for branch in s.branches)]
    wanted = [*naive(step[:GROUP], TOKEN), *naive(step[GROUP:], TOKEN)]
    rows = [rows[0] if rows else [0.0] * 4 for rows in wanted] + [row for rows in wanted for row in rows[1:]]
    for number, sample in enumerate(m.samples.tolist()):
        if sample < 0:
            continue
        span = slice(int(m.cu_seqlens[number]), int(m.cu_seqlens[number + 1]))
        mask = m.loss_mask[span]
        own = every[sample].rollout
        values = np.array(rows[sample])[own.written] + outcome[samples.trajectories[sample]]
        assert m.advantages[span][mask].tolist() == pytest.approx(values.tolist(), abs=1e-6)


def test_a_sample_is_skipped_only_if_all_its_tokens_have_the_advantage_zero():
    flat = [scored(rollout(n), 1.0, [0.5] * n) for n in (3, 4, 5)]
    other = [scored(rollout(3, 1), 1.0, [None, r, None]) for r in (0.0, 1.0, 0.5)]
    _, outcome, batch = packed([*flat, *other], PackingRules(max_tokens=64, skip_zero_advantage=True))
    trained = {i for m in batch.micro_batches for i in m.samples.tolist()} - {-1}
    assert outcome == [0.0] * 6, "the trajectories' other rewards are equal"
    assert trained == {3, 4}, "equal rewards, and a trajectory whose rewards are the group's mean, have no gradient"
    assert batch.num_sequences == 6


def test_rounds_of_dynamic_sampling_may_lack_rewards_of_tokens():
    with_tokens, without = with_token_advantages(two_groups()[GROUP:], GROUP, TOKEN), [scored(rollout(2), 1.0)] * GROUP
    both = StepSamples.of(without) + StepSamples.of(with_tokens)
    assert both.outcomes(GROUP).tolist() == [[1.0] * 3, [6.0, 1.0, 9.0]]
    kept = both.select(np.arange(GROUP, 2 * GROUP))
    assert [s.outcome for s in kept.own.values()] == [6.0, 1.0, 9.0]
    assert kept.largest_advantages(np.zeros(GROUP), None).any()


OWN = "rewards.functions=[{function: 'mine.py:f', per: token}]"
TURN = "rewards.functions=[{function: 'mine.py:f', per: turn}]"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["algorithm.advantage_by=token"], "token needs rewards of tokens; set `per: token` for a function"),
        ([OWN, "algorithm.advantage_by=token", "algorithm.scale_rewards=batch"], "token compares tokens within groups"),
        ([OWN, "algorithm.token_advantage_weight=2"], "only applies with advantage_by token"),
        (
            [OWN, "algorithm.advantage_by=token", "algorithm.multi_objective_aggregation=normalize_then_sum"],
            "normalize_then_sum their sums once more; choose sum_then_normalize",
        ),
        ([OWN, "algorithm.advantage_by=token", "algorithm.loss_type=gmpo"], "has one sign of the advantage"),
        (
            [OWN, "algorithm.advantage_by=token", "algorithm.off_policy_mask_threshold=1"],
            "the mask excludes whole responses",
        ),
        (
            [OWN, "algorithm.advantage_by=turn", "multi_turn.tools=[mine.py:tool]"],
            "or set `per: turn` for a function of your own",
        ),
        (
            [OWN, "algorithm.advantage_by=token", "algorithm.beta=0.1", "algorithm.kl_in_reward=true"],
            "needs advantages before the KL",
        ),
    ],
)
def test_the_config_refuses_what_contradicts_advantages_of_tokens(overrides, wanted):
    with pytest.raises(ConfigError, match="advantage") as error:
        load_config("megagrpo:quickstart", overrides)
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [OWN, "algorithm.advantage_by=token", "algorithm.scale_rewards=none"],
        [OWN],
        [TURN, "algorithm.advantage_by=turn", "multi_turn.tools=[mine.py:tool]"],
    ],
)
def test_rewards_of_turns_and_tokens_need_no_scheduler(overrides):
    assert load_config("megagrpo:quickstart", overrides).rewards.functions[0].per in ("turn", "token")
