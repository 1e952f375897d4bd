"""Trajectories of several samples: they count once in groups and averages, and each of their tokens is trained once.

The oracle is the formula of the trajectory: its tokens over all samples are one sequence.
"""

import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from megagrpo.algorithms.advantages import to_samples
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.config import AlgorithmSection, RunConfig
from megagrpo.data.packing.sample_packing import PackingRules, build_batch, pack, packing_rules, plan_packing
from megagrpo.data.packing.sample_table import TRUNCATED
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.records.rows.completions import completion_row
from megagrpo.records.rows.recorder import TrainedRollouts
from megagrpo.train_types import LossInputs
from megagrpo.trainer.policy_update import Learning
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.rollout.roles import role_metrics, trained_members
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics, staleness
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn
from tests.unit.for_each import for_each

ADVANTAGES = torch.tensor([[1.5, -0.5, 0.25, -1.25]])
RULES = PackingRules(max_tokens=24, share_prompts=True, mask_truncated=True)
LONGEST = 7  # rollout.max_completion_length


def sample(context, response, reason="stop", written=None, version=3, branches=()) -> Rollout:
    prompt = Prompt(0, tuple(context), "question")
    dialogue = None
    if written is not None:
        dialogue = Dialogue(np.array(written, bool), (), (Turn(0, len(response), calls=("f",)),), "done")
    logprobs = [-0.1 * token for token in response]
    return Rollout(prompt, response, logprobs, reason, version, "text", dialogue, branches=tuple(branches))


def group() -> list[ScoredRollout]:
    """One sample; three samples, two of them from one context; two samples with a tool's tokens; two, truncated."""
    rollouts = [
        sample((1, 2, 3), (4, 5), written=(1, 1)),
        sample(
            (1, 2, 3),
            (6, 7, 8, 9),
            written=(1, 0, 1, 1),
            branches=[sample((5, 6, 7), (8, 2), "length"), sample((1, 2, 3, 6), (5,)), sample((5, 6, 7), (9, 9, 2))],
        ),
        sample(
            (1, 2, 3), (5, 5, 2), written=(1, 1, 1), branches=[sample((1, 2, 9), (3, 4), written=(0, 1), version=1)]
        ),
        sample((1, 2, 3), (7,), "length", written=(1,), branches=[sample((4, 4), (4, 2))]),
    ]
    return [ScoredRollout(rollout, {"f": float(i)}, float(i)) for i, rollout in enumerate(rollouts)]


def batches(scored, ranks: int, rules: PackingRules):
    return [pack(to_samples(scored, ADVANTAGES), rules, rank, ranks) for rank in range(ranks)]


def tokens_of(scored: ScoredRollout) -> list[tuple[Rollout, int]]:
    """The loss tokens of a trajectory: its samples, and the indices in their responses."""
    if scored.rollout.finish_reason == "length":
        return []
    of_all = (scored.rollout, *scored.rollout.branches)
    return [(of, i) for of in of_all for i in np.flatnonzero(of.written).tolist()]


@for_each("loss_type", ["grpo", "dapo", "dr_grpo"])
@for_each("ranks", [1, 2, 3])
@for_each("share_prompts", [False, True])
def test_a_trajectory_is_one_sequence_of_the_loss_in_every_layout(loss_type, ranks, share_prompts):
    algorithm, scored = AlgorithmSection(loss_type=loss_type, mask_truncated_completions=True), group()
    loss, average = make_loss(algorithm), algorithm.loss.average
    trajectories = [tokens_of(s) for s in scored]
    divisor = {
        "sequence_means": len(scored),
        "tokens": sum(map(len, trajectories)),
        "fixed_length": len(scored) * LONGEST,
    }[average]
    # log-probs are the sampled ones plus 0.01, and every ratio is 1: each token adds -A, over its trajectory's length
    expected = 0.0
    for tokens, advantage in zip(trajectories, ADVANTAGES.flatten().tolist(), strict=True):
        expected -= sum(advantage / (len(tokens) if average == "sequence_means" else 1) for _ in tokens) / divisor
    total, trained = 0.0, []
    for batch in batches(scored, ranks, replace(RULES, share_prompts=share_prompts)):
        assert denominator(batch, average, LONGEST) == divisor
        assert batch.num_sequences == 4 and batch.trajectories == (0, 1, 2, 3) and batch.num_tokens == 15
        for m in batch.micro_batches:
            output = loss(LossInputs(m.rollout_logprobs + 0.01, torch.zeros(m.num_tokens), m))
            total += output.numerator.item() / divisor
            trained += m.labels[m.loss_mask].tolist()
    assert total == pytest.approx(expected, abs=1e-6)
    assert sorted(trained) == sorted(int(of.response_ids[i]) for tokens in trajectories for of, i in tokens)


def test_samples_of_equal_contexts_share_them_although_others_lie_between():
    samples = StepSamples.of(group())
    shapes = samples.shapes(ADVANTAGES.flatten().double().numpy(), RULES)
    members = samples.members(np.arange(4))
    assert members.tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8], "4 and 6 have one context, and 5 lies between them"
    plan = plan_packing(shapes, RULES, 1, members)
    spans = plan.computed.spans.tolist()
    assert spans.count([0, 2]) == 2 and [2, 6] in spans, "no copy of the contexts (1, 2) and (5, 6)"
    assert samples.members(np.array([2])).tolist() == [2, 7] and samples.members(np.array([1])).tolist() == [1, 4, 6, 5]


def test_metrics_count_trajectories_over_all_their_samples():
    samples = StepSamples.of(group())
    metrics = rollout_metrics(samples)
    lengths = [2, 3 + 2 + 1 + 3, 3 + 1, 1 + 2]
    assert samples.written.tolist() == lengths and metrics["completions/max_length"] == 9
    assert metrics["completions/mean_length"] == sum(lengths) / 4 and metrics["completions/clipped_ratio"] == 0.25
    assert metrics["num_tokens"] == 5 + (7 + 5 + 5 + 6) + (6 + 5) + (4 + 4)
    assert metrics["multi_turn/mean_turns"] == 5 / 4 and metrics["tools/call_frequency"] == 5 / 4
    ages = [1] * 2 + [1] * 10 + [1] * 3 + [3] * 2 + [1] * 3
    assert staleness(samples, 4) == {"staleness/mean": sum(ages) / len(ages), "staleness/max": 3.0}


def test_the_end_of_a_trajectory_masks_all_its_samples_and_the_end_of_a_branch_none():
    every = StepSamples.of(group()).every
    assert every.has(TRUNCATED).tolist() == [False, False, False, True, False, False, False, False, True]


def test_chosen_and_added_trajectories_keep_their_samples():
    one, other = StepSamples.of(group()), StepSamples.of(group()[2:])
    both = one.select(np.array([3, 1])) + other
    assert both.trajectories.tolist() == [0, 1, 2, 3, 0, 1, 1, 1, 2, 3]
    names = ("length", "version", "prompt_key")
    expected = StepSamples.of([group()[i] for i in (3, 1, 2, 3)])
    for name in names:
        assert both.every.facts[name].tolist() == expected.every.facts[name].tolist()
    assert {i: s.rollout for i, s in both.every.own.items()} == {i: s.rollout for i, s in expected.every.own.items()}
    plain = StepSamples.of(group()[:1])
    assert (plain + other).trajectories.tolist() == [0, 1, 2, 1, 2], "the first round had no branches"


def test_without_branches_facts_and_packing_are_as_before():
    scored = group()[:1]
    samples = StepSamples.of(scored)
    assert samples.every is samples and "branches" not in samples.facts.dtype.names
    assert samples.shapes(np.ones(1), RULES).trajectories is None
    (batch,) = batches(scored, 1, RULES)
    assert batch.micro_batches[0].several is None and batch.samples == batch.trajectories == (0,)
    assert samples.rewards(1).tolist() == [samples.facts["reward"].tolist()], "one sample: a field has the row's stride"


def test_tokens_of_a_turn_have_its_advantage_in_every_layout():
    """Two turns with a tool between them, a branch with one turn, and a sample without turns."""
    turns = Turn(0, 2, 1.0), Turn(3, 5, 0.0)
    dialogue = Dialogue(np.array([1, 1, 0, 1, 1], bool), (), turns, "done")
    main = replace(sample((1, 2, 3), (6, 7, 8, 9, 2)), dialogue=dialogue)
    branch = sample((5, 6), (4, 3), written=(1, 1))
    plain = sample((1, 2, 3), (9, 4))
    scored = [ScoredRollout(replace(main, branches=(branch,)), {}, 1.0), ScoredRollout(plain, {}, 0.0)]
    samples, of_turns = StepSamples.of(scored, turns=True), np.array([0.5, 0.0, -2.0])  # the branch's turn comes first
    advantages = torch.tensor([[0.25, -0.75]])
    whole = samples.with_turn_advantages(dict(enumerate(to_samples(scored, advantages))), of_turns)
    expected = {(0, 6): 0.0, (0, 7): 0.0, (0, 9): -2.0, (0, 2): -2.0, (1, 9): -0.75, (1, 4): -0.75}
    expected |= {(2, 4): 0.5, (2, 3): 0.5}
    for ranks, share_prompts in ((1, False), (1, True), (2, True)):
        trained = {}
        for rank in range(ranks):
            rules = PackingRules(max_tokens=24, share_prompts=share_prompts)
            for m in pack(list(whole.values()), rules, rank, ranks).micro_batches:
                owners = m.samples[m.sequence_index][m.loss_mask].tolist()
                rows = m.labels[m.loss_mask].tolist(), m.advantages[m.loss_mask].tolist()
                trained |= {(owner, token): a for owner, token, a in zip(owners, *rows, strict=True)}
        assert trained == expected
    flat = advantages.flatten().double().numpy()
    assert samples.largest_advantages(flat, of_turns).tolist() == [2.0, -0.75, 0.5]
    first_is_largest = samples.largest_advantages(flat, np.array([0.5, -2.0, 0.25]))
    assert first_is_largest.tolist() == [2.0, -0.75, 0.5], "the largest turn need not be the last one"
    zeros = samples.largest_advantages(flat, np.array([0.5, 0.0, 0.0]))
    assert zeros.tolist() == [0.0, -0.75, 0.5], "only a sample whose turns all have 0 may be skipped"


def test_turns_that_answered_the_same_tokens_have_one_state():
    def conversation(context, ids, *spans):
        written = np.zeros(len(ids), bool)
        for start, stop in spans:
            written[start:stop] = True
        return replace(
            sample(context, ids), dialogue=Dialogue(written, (), tuple(Turn(*span) for span in spans), "done")
        )

    one = conversation((1, 2), (5, 9, 6, 9, 7), (0, 1), (2, 3), (4, 5))
    other = conversation((1, 2), (8, 4, 9, 3), (0, 1), (3, 4))
    third = conversation((9,), (4, 9, 3), (0, 1), (2, 3))
    samples = StepSamples.of([ScoredRollout(rollout, {}, 0.0) for rollout in (one, other, third)], turns=True)
    states = samples.turns["state"].tolist()
    assert states[0] == states[3] and states[1] == states[2] == states[6] and len(set(states)) == 4


ROLES = {"solver": 1.0, "judge": 0.5, "frozen": 0.0}


def with_roles() -> list[ScoredRollout]:
    """Two groups of three: in the second one only one trajectory has a judge. A reward is None."""
    of_trajectories = [
        [("solver", (4, 5), 1.0), ("judge", (6,), 0.0), ("solver", (7, 8, 9), 1.0)],
        [("solver", (3,), 0.0), ("judge", (2, 9), 1.0), ("frozen", (4, 4, 4), 1.0)],
        [("solver", (8, 8), 0.0), ("judge", (5, 5, 5), 3.0), ("frozen", (3, 4), -1.0)],
        [("solver", (5, 6), 2.0), ("judge", (9,), 1.0)],
        [("solver", (7,), -1.0)],
        [("frozen", (7, 3), 0.0), ("solver", (9, 2), None)],
    ]
    scored = []
    for i, parts in enumerate(of_trajectories):
        rewards = {role: reward for role, _, reward in parts}
        samples = []
        for number, (role, ids, _) in enumerate(parts):
            one = sample((1, 2, i, number), ids, written=[1] * len(ids))
            prompt = replace(one.prompt, prompt_id=i // 3)
            samples.append(replace(one, prompt=prompt, dialogue=replace(one.dialogue, role=role, rewards=rewards)))
        main = replace(samples[-1], branches=tuple(samples[:-1]))
        known = [reward for reward in rewards.values() if reward is not None]
        scored.append(ScoredRollout(main, {"f": 0.25 * i} | rewards, 0.25 * i + sum(known)))
    return scored


@for_each("loss_type", ["grpo", "dapo", "dr_grpo"])
@for_each("ranks", [1, 2])
@for_each("estimator", ["grpo", "rloo"])
def test_roles_have_baselines_weights_and_sequences_of_their_own_in_every_layout(loss_type, ranks, estimator):
    """The oracle: each role of a trajectory is a sequence, with the reward of the role and of function f."""
    config = RunConfig.model_validate(
        dict(
            model=dict(path="/m"),
            data=dict(train=dict(source="d.jsonl")),
            rollout=dict(num_generations=3, max_completion_length=LONGEST),
            multi_turn=dict(agent=dict(function="a:b", roles=ROLES)),
            rewards=dict(functions=[dict(function="a:f")]),
            algorithm=dict(loss_type=loss_type, advantage_estimator=estimator),
        )
    )
    scored, learning = with_roles(), Learning(config, *[None] * 7)
    samples = StepSamples.of(scored)
    advantages = learning.advantages(samples).numpy()

    sequences = {}  # (trajectory, role) -> its reward and its tokens
    for i, s in enumerate(scored):
        for one in s.rollout.samples:
            own = s.rewards[one.dialogue.role]
            reward = 0.25 * i + (own or 0.0)
            sequences.setdefault((i, one.dialogue.role), (reward, []))[1].extend(one.response_ids.tolist())
    expected, gradient = {}, 0.0
    for (i, role), (reward, _) in sequences.items():
        group = [r for (j, other), (r, _) in sequences.items() if other == role and j // 3 == i // 3]
        others = [r for (j, other), (r, _) in sequences.items() if other == role and j // 3 == i // 3 and j != i]
        baseline = statistics.fmean(others if estimator == "rloo" else group) if others else reward
        spread = statistics.stdev(group) + 1e-4 if len(group) > 1 else 1.0
        expected[i, role] = ROLES[role] * (reward - baseline) / spread
    trained = {key: tokens for key, (_, tokens) in sequences.items() if ROLES[key[1]]}
    count = {"grpo": len(trained), "dapo": sum(map(len, trained.values())), "dr_grpo": len(trained) * LONGEST}[
        loss_type
    ]
    for key, tokens in trained.items():
        gradient -= expected[key] * (1 if loss_type == "grpo" else len(tokens)) / count
    of_samples = [(i, s.role) for i, s in enumerate(scored)] + [
        (i, b.role) for i, s in enumerate(scored) for b in s.branches
    ]
    assert advantages.tolist() == pytest.approx([expected[key] for key in of_samples], abs=1e-12)
    assert expected[3, "judge"] == 0.0 and expected[1, "frozen"] == 0.0

    shapes, total, seen = samples.shapes(advantages, replace(RULES, mask_truncated=False)), 0.0, []
    plan = plan_packing(shapes, RULES, ranks, trained_members(samples, learning.roles(samples), np.arange(6)))
    pairs = zip(to_samples(scored, torch.zeros(6)), advantages.tolist(), strict=True)
    whole = {i: replace(s, advantage=advantage) for i, (s, advantage) in enumerate(pairs)}
    for rank in range(ranks):
        batch = build_batch(plan, rank, whole, RULES)
        assert denominator(batch, config.algorithm.loss.average, LONGEST) == count
        for m in batch.micro_batches:
            output = make_loss(config.algorithm)(LossInputs(m.rollout_logprobs, torch.zeros(m.num_tokens), m))
            total += output.numerator.item() / count
            seen += m.labels[m.loss_mask].tolist()
    assert total == pytest.approx(gradient, abs=1e-6)
    assert sorted(seen) == sorted(token for tokens in trained.values() for token in tokens)

    metrics = role_metrics(samples, learning.roles(samples), 3)
    judge = {
        key: metrics[f"roles/judge/{key}"] for key in ("groups", "single_groups", "samples", "mean_length", "reward")
    }
    assert judge == dict(
        groups=2, single_groups=1, samples=4, mean_length=1.75, reward=pytest.approx((0 + 1.25 + 3.5 + 1.75) / 4)
    )
    assert metrics["roles/frozen/groups"] == 2 and metrics["frac_reward_zero_std"] == 0.0
    rows = TrainedRollouts(1, samples, advantages.tolist())
    written = completion_row(1, scored[0], rows.advantages[0], None, rows.of_branches(0))
    assert (written["role"], written["advantage"]) == ("solver", expected[0, "solver"])
    branches = [(branch["role"], branch["advantage"]) for branch in written["branches"]]
    assert branches == [("solver", expected[0, "solver"]), ("judge", expected[0, "judge"])]


def test_a_game_whose_rewards_add_up_to_0_teaches_beside_a_task_without_roles():
    """The sum of the players' rewards is the same in both games of the first group."""
    data = dict(train=dict(source="d.jsonl"))
    game = dict(name="game", data=data, multi_turn=dict(agent=dict(function="a:b", roles={"x": 1.0, "o": 1.0})))
    config = RunConfig.model_validate(
        dict(
            model=dict(path="/m"),
            rollout=dict(num_generations=2),
            rewards=dict(functions=[dict(function="a:f")]),
            algorithm=dict(dynamic_sample=True, scale_rewards="none"),
            tasks=[game | dict(rewards=dict(functions=[])), dict(name="plain", data=data)],
        )
    )
    scored = []
    for number, rewards in enumerate(({"x": 1.0, "o": -1.0}, {"x": -1.0, "o": 1.0})):
        x, o = (sample((1, 2), (3 + number,), written=[1]) for _ in rewards)
        o = replace(o, dialogue=replace(o.dialogue, role="o"))
        x = replace(x, dialogue=replace(x.dialogue, role="x", rewards=rewards), branches=(o,))
        x = replace(x, prompt=replace(x.prompt, task="game"))
        scored.append(ScoredRollout(x, {f"game/{role}": reward for role, reward in rewards.items()}, 0.0))
    for reward in (0.5, 1.5):
        plain = sample((5, 6), (7,))
        plain = replace(plain, prompt=replace(plain.prompt, prompt_id=1, task="plain"))
        scored.append(ScoredRollout(plain, {"plain/f": reward}, reward))
    samples, learning = StepSamples.of(scored), Learning(config, *[None] * 7)
    assert learning.advantages(samples).tolist() == [1.0, -1.0, -0.5, 0.5, -1.0, 1.0]
    assert Rollouts(config, *[None] * 5)._useful_groups(samples).tolist() == [0, 1]
    metrics = role_metrics(samples, learning.roles(samples), 2)
    assert metrics["frac_reward_zero_std"] == metrics["tasks/game/frac_reward_zero_std"] == 0.0
    assert metrics["tasks/game/roles/o/reward_std"] == pytest.approx(2**0.5)
    assert not any("plain/roles" in name or name.startswith("roles/") for name in metrics)


def of_tasks_with_roles() -> list[ScoredRollout]:
    """Groups of a task with the roles of `with_roles` (3 responses), a game of two roles (2) and a task without roles
    (4)."""
    scored = [_of_task(one, "duel", one.rollout.prompt.prompt_id, 3) for one in with_roles()]
    chance = np.random.default_rng(2)
    for group in (2, 3, 4):
        for number in range(2):
            rewards = {"x": float(chance.normal()), "o": float(chance.normal())}
            x, o = (
                sample((1, group, number), (3, 4, 5)[: 1 + number + k], written=[1] * (1 + number + k)) for k in (0, 1)
            )
            o = replace(o, dialogue=replace(o.dialogue, role="o"))
            x = replace(x, dialogue=replace(x.dialogue, role="x", rewards=rewards), branches=(o,))
            scored.append(_of_task(ScoredRollout(x, {"f": 0.5} | rewards, 0.0), "game", group, 2))
    for number in range(4):
        plain = sample((5, 6, 9), (7, 8, 9, 4, 3)[: 2 + number])
        scored.append(_of_task(ScoredRollout(plain, {"f": float(number == 1)}, float(number == 1)), "plain", 5, 4))
    return scored


def _of_task(scored: ScoredRollout, task: str, prompt_id: int, group: int) -> ScoredRollout:
    """The same rollout as one of a task, whose rewards have the task's name in front."""
    prompt = replace(scored.rollout.prompt, task=task, prompt_id=prompt_id, num_generations=group)
    branches = tuple(replace(branch, prompt=prompt) for branch in scored.rollout.branches)
    rewards = {f"{task}/{name}": reward for name, reward in scored.rewards.items()}
    return ScoredRollout(replace(scored.rollout, prompt=prompt, branches=branches), rewards, scored.reward)


@for_each("share", ["none", "prompts", "tasks"])
@for_each("options", ["grpo group 1", "dapo batch 2", "dr_grpo group 2"])
def test_roles_of_tasks_with_loss_weights_have_the_formulas_advantages_and_shares_of_the_loss(share, options):
    """The oracle in float64: a role of a trajectory is a sequence; its statistics are those of its role and task; the
    share of a task in the loss is `loss_weight` times its tokens or sequences, its prompts, or 1."""
    loss_type, scale, ranks = options.split()
    data, sizes, factors = (
        dict(train=dict(source="d.jsonl")),
        dict(duel=3, game=2, plain=4),
        dict(duel=2.0, game=0.5, plain=1.0),
    )
    roles, weight = dict(duel=ROLES, game={"x": 1.0, "o": 0.25}, plain={}), dict(duel=1.0, game=2.0, plain=1.0)
    tasks = [
        dict(name=name, data=data, loss_weight=factors[name], rollout=dict(num_generations=size))
        | dict(rewards=dict(functions=[dict(function="a:f", weight=weight[name])]))
        | (dict(multi_turn=dict(agent=dict(function="a:b", roles=roles[name]))) if roles[name] else {})
        for name, size in sizes.items()
    ]
    by = None if share == "none" else share
    algorithm = dict(loss_type=loss_type, scale_rewards=scale, loss_share_of_tasks=by)
    limits = dict(num_generations=8, max_completion_length=LONGEST)
    config = RunConfig.model_validate(dict(model=dict(path="/m"), rollout=limits, algorithm=algorithm, tasks=tasks))
    scored, learning = of_tasks_with_roles(), Learning(config, *[None] * 7)
    samples = StepSamples.of(scored)
    advantages = learning.advantages(samples)

    sequences = {}  # (trajectory, role) -> task, group, reward, tokens
    for i, one in enumerate(scored):
        prompt, f = one.rollout.prompt, one.rewards[f"{one.rollout.prompt.task}/f"] * weight[one.rollout.prompt.task]
        for part in one.rollout.samples:
            role = part.dialogue.role if part.dialogue else ""
            reward = f + ((one.rewards[f"{prompt.task}/{role}"] or 0.0) if role else 0.0)
            entry = sequences.setdefault((i, role), (prompt.task, prompt.prompt_id, reward, []))
            entry[3].extend(part.response_ids.tolist())
    expected = {}
    for (i, role), (task, group, reward, _) in sequences.items():
        same = [(g, r) for (_, other), (t, g, r, _) in sequences.items() if (t, other) == (task, role)]
        of_group = [r for g, r in same if g == group]
        among = of_group if scale == "group" else [r for _, r in same]
        spread = statistics.stdev(among) + 1e-4 if len(among) > 1 else 1.0
        expected[i, role] = roles[task].get(role, 1.0) * (reward - statistics.fmean(of_group)) / spread
    of_samples = [(i, s.role) for i, s in enumerate(scored)]
    of_samples += [(i, branch.role) for i, s in enumerate(scored) for branch in s.branches]
    assert advantages.tolist() == pytest.approx([expected[key] for key in of_samples], abs=1e-12)

    trained = {key: value for key, value in sequences.items() if roles[value[0]].get(key[1], 1.0)}
    part = {key: len(tokens) if loss_type == "dapo" else 1 for key, (*_, tokens) in trained.items()}
    amounts = {name: sum(part[key] for key, (task, *_) in trained.items() if task == name) for name in sizes}
    prompts = {name: len({group for task, group, *_ in trained.values() if task == name}) for name in sizes}
    of_task = {"none": amounts, "prompts": prompts, "tasks": dict.fromkeys(sizes, 1)}[share]
    shares = {name: factors[name] * of_task[name] for name in sizes}
    shares = {name: value / sum(shares.values()) for name, value in shares.items()}
    whole = sum(amounts.values())
    loss = 0.0
    for key, (task, _, _, tokens) in trained.items():
        token = expected[key] / len(tokens) if loss_type == "grpo" else expected[key]
        count = whole * (LONGEST if loss_type == "dr_grpo" else 1)
        loss -= token * len(tokens) * shares[task] * whole / amounts[task] / count

    rules, total = packing_rules(config, True), 0.0
    shapes = samples.shapes(advantages.numpy(), rules)
    plan = plan_packing(
        shapes, rules, int(ranks), trained_members(samples, learning.roles(samples), np.arange(len(samples)))
    )
    own = to_samples(scored, torch.zeros(len(scored)))
    whole_samples = {i: replace(s, advantage=a) for i, (s, a) in enumerate(zip(own, advantages.tolist(), strict=True))}
    for rank in range(int(ranks)):
        batch = learning._weighed(build_batch(plan, rank, whole_samples, rules), samples, plan)
        divisor = denominator(batch, config.algorithm.loss.average, LONGEST)
        assert divisor == whole * (LONGEST if loss_type == "dr_grpo" else 1)
        for m in batch.micro_batches:
            total += (
                make_loss(config.algorithm)(LossInputs(m.rollout_logprobs, m.rollout_logprobs, m)).numerator.item()
                / divisor
            )
    assert total == pytest.approx(loss, rel=1e-5, abs=1e-6)


@for_each("ranks", [1, 2])
@for_each("options", ["grpo group", "grpo batch", "rloo none", "reinforce_plus_plus_baseline batch"])
def test_groups_of_2_4_and_8_responses_in_one_step_have_the_formulas_advantages_and_loss(options, ranks):
    estimator, scale = options.split()
    sizes, data = {"two": 2, "four": 4, "eight": 8}, dict(train=dict(source="d.jsonl"))
    config = RunConfig.model_validate(
        dict(
            model=dict(path="/m"),
            rewards=dict(functions=[dict(function="a:f")]),
            algorithm=dict(advantage_estimator=estimator, scale_rewards=scale, dynamic_sample=True),
            tasks=[dict(name=name, data=data, rollout=dict(num_generations=n)) for name, n in sizes.items()],
        )
    )
    order, number, scored, groups = ["two", "eight", "four", "two"], np.random.default_rng(0), [], []
    for prompt_id, task in enumerate(order):
        prompt = Prompt(prompt_id, (1, 2, 3 + prompt_id), "q", task=task, num_generations=sizes[task])
        rewards = [1.0] * 2 if prompt_id == 3 else number.normal(size=sizes[task]).tolist()
        groups.append((task, rewards))
        for k, reward in enumerate(rewards):
            response = tuple(range(4, 5 + k % 3))
            rollout = Rollout(prompt, response, [-0.1] * len(response), "stop", 0, "")
            scored.append(ScoredRollout(rollout, {f"{task}/f": reward}, reward))
    samples, learning = StepSamples.of(scored), Learning(config, *[None] * 7)

    expected = []
    for task, rewards in groups:
        batch = [r for name, others in groups if name == task for r in others]
        centred = [r - statistics.fmean(others) for name, others in groups if name == task for r in others]
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :] if estimator == "rloo" else rewards
            among = {"group": rewards, "batch": batch}.get(scale)
            among = centred if estimator == "reinforce_plus_plus_baseline" else among
            spread = statistics.stdev(among) + 1e-4 if among else 1.0
            expected.append((reward - statistics.fmean(others)) / spread)
    advantages = learning.advantages(samples)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-10) and advantages[-2:].tolist() == [0, 0]

    lengths, rules = [len(s.rollout.response_ids) for s in scored], packing_rules(config, True)
    plan = plan_packing(samples.shapes(advantages.numpy(), rules), rules, ranks, np.arange(len(samples)))
    total = 0.0
    for rank in range(ranks):
        batch = build_batch(plan, rank, dict(enumerate(to_samples(scored, advantages))), rules)
        for m in batch.micro_batches:
            total += make_loss(config.algorithm)(LossInputs(m.rollout_logprobs, m.rollout_logprobs, m)).numerator.item()
    assert (batch.num_tokens, batch.num_sequences) == (sum(lengths), 16)
    assert total == pytest.approx(-sum(a * n for a, n in zip(expected, lengths, strict=True)), abs=1e-5)

    rollouts = Rollouts(config, *[None] * 5)
    useful, counters = rollouts._useful_groups(samples), {}
    assert useful.tolist() == [0, 1, 2]
    kept = replace(
        rollouts,
        config=config.model_copy(update={"rollout": config.rollout.model_copy(update={"prompts_per_step": 2})}),
    )
    kept = kept._useful(samples, useful, 0, counters)
    assert [prompt.prompt_id for prompt in kept.prompts] == [0] * 2 + [1] * 8
    assert counters["dynamic_sample/groups_drawn"] == 4
