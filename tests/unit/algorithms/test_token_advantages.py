"""Advantages of tokens against the formula of DeepSeekMath's process supervision, token by token in plain Python."""

import itertools
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
from megagrpo.data.packing.sample_packing import UNLIMITED, PackingRules, pack
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.types import Dialogue, PartRewards, Prompt, Rollout, ScoredRollout
from tests.unit.for_each import for_each

EPSILON, GROUP = 1e-4, 3
TOKEN = AlgorithmSection(advantage_by="token")
PROCESS = AlgorithmSection(advantage_by="process")


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
    places, rewards = [], []  # of the tokens that the policy wrote, for each trajectory
    for s in group:
        tokens = s.parts.tokens if s.parts else ()
        tokens = () if all(np.isnan(row).all() for row in tokens) else tokens  # it could not be scored
        order = [*range(1, len(tokens)), 0][: len(tokens)]
        samples = [s.rollout, *s.rollout.branches]
        places.append([(i, int(t)) for i in order for t in samples[i].written.nonzero()[0]])
        rewards.append([float(tokens[i][t]) for i, t in places[-1]])
    values = (returns if algorithm.advantage_by == "token" else process)(rewards, algorithm.scale_rewards == "group")
    result = []
    for s, of_trajectory, row in zip(group, places, values, strict=True):
        rows = [[0.0] * len(r.response_ids) for r in (s.rollout, *s.rollout.branches)]
        for (i, t), value in zip(of_trajectory, row, strict=True):
            rows[i][t] = algorithm.token_advantage_weight * value
        result.append(rows if of_trajectory else [])
    return result


def compared(value, values, scaled):
    if len(values) < 2:
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + EPSILON if scaled else 1.0)


def process(rewards, scaled):
    known = [r for row in rewards for r in row if not math.isnan(r)]
    return [
        [sum(compared(r, known, scaled) for r in row[t:] if not math.isnan(r)) for t in range(len(row))]
        for row in rewards
    ]


def returns(rewards, scaled):
    def before(row, t):
        return sum(not math.isnan(r) for r in row[:t])

    def value(row, t):
        return sum(r for r in row[t:] if not math.isnan(r))

    def others(count):
        """The return of the first token with `count` rewards before it of each trajectory that has one."""
        firsts = [(row, next((t for t in range(len(row)) if before(row, t) == count), None)) for row in rewards]
        return [value(row, t) for row, t in firsts if t is not None]

    return [[compared(value(row, t), others(before(row, t)), scaled) for t in range(len(row))] for row in rewards]


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


@for_each("by", ["token", "process"])
@for_each("scale", ["group", "none"])
@for_each("weight", [1.0, 0.25])
def test_tokens_have_the_advantages_of_the_formula(by, scale, weight):
    algorithm = AlgorithmSection(advantage_by=by, scale_rewards=scale, token_advantage_weight=weight)
    step = two_groups()
    found = with_token_advantages(step, GROUP, algorithm)
    wanted = [*naive(step[:GROUP], algorithm), *naive(step[GROUP:], algorithm)]
    for s, rows in zip(found, wanted, strict=True):
        assert [row.dtype for row in s.token_advantages] == [np.float32] * len(rows)
        assert [row.tolist() for row in s.token_advantages] == [pytest.approx(row, abs=1e-6) for row in rows]


@pytest.mark.parametrize("algorithm", [TOKEN, PROCESS], ids=["token", "process"])
def test_rewards_at_the_end_alone_give_the_advantage_of_the_trajectory(algorithm):
    """One reward per trajectory, at its last token: both are then outcome supervision."""
    rewards = [1.0, 0.0, 0.25]
    step = [scored(rollout(n), 0.0, [None] * (n - 1) + [r]) for n, r in zip((4, 2, 7), rewards, strict=True)]
    found = with_token_advantages(step, GROUP, algorithm)
    outcome = group_advantages(torch.tensor([rewards]), "group")
    for s, advantage in zip(found, outcome.flatten().tolist(), strict=True):
        assert s.token_advantages[0].tolist() == pytest.approx([advantage] * len(s.rollout.response_ids), rel=1e-6)


def test_a_penalty_for_each_token_favours_short_responses():
    """Process supervision subtracts its mean from each token's penalty, so that nothing is left (verl's issue 7244)."""
    step = [scored(rollout(n), 0.0, [-0.01] * n) for n in (2, 4, 9)]
    first = [s.token_advantages[0][0] for s in with_token_advantages(step, GROUP, TOKEN)]
    assert first[0] > 0.5 > -0.5 > first[2] and sum(first) == pytest.approx(0, abs=1e-6)
    assert not any(s.token_advantages[0].any() for s in with_token_advantages(step, GROUP, PROCESS))


def test_the_choice_to_end_has_the_advantage_of_what_it_forgoes():
    """After one step with the reward 0, one trajectory ends and the others take a step more, for 1 and for 0.5."""
    rows = [[0.0, None], [0.0, 1.0], [0.0, 0.5]]
    unscaled = AlgorithmSection(advantage_by="token", scale_rewards="none")
    found = with_token_advantages([scored(rollout(2), 0.0, row) for row in rows], GROUP, unscaled)
    assert [s.token_advantages[0][1] for s in found] == pytest.approx([-0.5, 0.5, 0.0])


@pytest.mark.parametrize(("rewards", "process_errs"), [((1.0, 0.2, 0.2), True), ((0.0, -0.5, 2.0), False)], ids=str)
def test_the_mean_gradient_of_returns_points_uphill_whenever_the_policy_ends(rewards, process_errs):
    """The policy ends after one or two tokens with probability 0.4 each, or has three. Over all groups, the mean
    gradient with respect to the logit of going on is compared with that of the mean reward (verl's issue 7244)."""
    more = 0.6
    chances = {1: 1 - more, 2: more * (1 - more), 3: more * more}

    def gradient(logit_of, row):
        """Sum of advantage times gradient of the log-probability of each choice."""
        return sum(a * ((1 - more) if t < logit_of else -more) for t, a in enumerate(row[:2], 1))

    def mean_gradient(algorithm):
        total = 0.0
        for lengths in itertools.product(chances, repeat=GROUP):
            group = [scored(rollout(n), 0.0, rewards[:n]) for n in lengths]
            rows = [s.token_advantages[0].tolist() for s in with_token_advantages(group, GROUP, algorithm)]
            chance = math.prod(chances[n] for n in lengths)
            total += chance * sum(gradient(n, row) for n, row in zip(lengths, rows, strict=True))
        return total

    uphill = sum(chances[n] * gradient(n, [sum(rewards[:n])] * n) for n in chances)
    unscaled = dict(scale_rewards="none")
    assert mean_gradient(AlgorithmSection(advantage_by="token", **unscaled)) * uphill > 0
    assert (mean_gradient(AlgorithmSection(advantage_by="process", **unscaled)) * uphill < 0) == process_errs


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
    rows = [rows[0] if rows else [0.0] * len(s.rollout.response_ids) for s, rows in zip(step, wanted, strict=True)] + [
        row for rows in wanted for row in rows[1:]
    ]
    for number, sample in enumerate(m.samples.tolist()):
        if sample < 0:
            continue
        span = slice(int(m.cu_seqlens[number]), int(m.cu_seqlens[number + 1]))
        mask = m.loss_mask[span]
        own = every[sample].rollout
        values = np.array(rows[sample])[own.written] + outcome[samples.trajectories[sample]]
        assert m.advantages[span][mask].tolist() == pytest.approx(values.tolist(), abs=1e-6)


def test_a_sample_is_skipped_only_if_all_its_tokens_have_the_advantage_zero():
    flat = [scored(rollout(4), 1.0, [0.5] * 4) for _ in range(GROUP)]
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


@for_each(
    ("overrides", "wanted"),
    [
        (["algorithm.advantage_by=token"], "token needs rewards of tokens; set `per: token` for a function"),
        ([OWN, "algorithm.advantage_by=token", "algorithm.scale_rewards=batch"], "token compares tokens within groups"),
        ([OWN, "algorithm.token_advantage_weight=2"], "only applies with advantage_by token"),
        (
            [OWN, "algorithm.advantage_by=token", "algorithm.multi_objective_aggregation=normalize_then_sum"],
            "normalize_then_sum their sums once more; choose sum_then_normalize",
        ),
        ([OWN, "algorithm.advantage_by=process", "algorithm.loss_type=gmpo"], "has one sign of the advantage"),
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
