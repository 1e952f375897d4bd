"""Shares of tasks: exact after every prompt, the same after a restart, and each task in its own order."""

import json
import random
from fractions import Fraction

import pytest

from megagrpo.config import ConfigError, DataSection, RolloutSection, Task
from megagrpo.config.tasks import PassRateWeight
from megagrpo.data.sources.prompt_order import PromptOrder, RowPermutation
from megagrpo.data.sources.task_mixture import Mixture, Shares
from megagrpo.train_types import TrainState


def test_counts_differ_from_the_shares_by_less_than_one_prompt_after_every_prompt():
    chance = random.Random(0)
    lists = [[3, 1], [1, 1, 1], [0.7, 0.2, 0.1], [1e-3, 1], [5, 5, 5, 1, 2]]
    lists += [
        [chance.choice([chance.randint(1, 50), round(chance.random(), 3) + 0.001]) for _ in range(n)] for n in (7, 40)
    ]
    for weights in lists:
        shares, exact = Shares(weights), [Fraction(str(weight)) for weight in weights]
        for n in range(1, 1001):
            shares.next()
            wanted = [n * weight / sum(exact) for weight in exact]
            assert all(abs(count - want) < 1 for count, want in zip(shares.counts, wanted, strict=True)), (weights, n)


def test_weights_that_add_up_to_a_step_are_the_prompts_of_each_step():
    shares = Shares([3, 4, 1])
    for _ in range(5):
        step = [shares.next() for _ in range(8)]
        assert [step.count(task) for task in range(3)] == [3, 4, 1]


def test_weights_by_step_hold_from_their_step_on_also_after_a_restart():
    whole, weights = mixture(({1: 3, 3: 1}, {1: 1, 3: 0, 4: 3})), ("t0", "t1")
    drawn = [prompt.task for prompt in whole.next(40)]
    steps = [[drawn[i : i + 8].count(name) for name in weights] for i in range(0, 40, 8)]
    assert steps == [[6, 2], [6, 2], [8, 0], [2, 6], [2, 6]]
    for before in range(41):
        first, second, state = (*(mixture(({1: 3, 3: 1}, {1: 1, 3: 0, 4: 3})) for _ in range(2)), TrainState())
        assert [prompt.task for prompt in first.next(before)] == drawn[:before]
        first.store(state)
        second.restore(state)
        assert [prompt.task for prompt in second.next(40 - before)] == drawn[before:]


def test_a_task_leaves_after_its_last_prompt_and_the_others_share_by_their_weights():
    shares = Shares([50, 7, 3], [45, None, None])
    drawn = [shares.next() for _ in range(154)]
    last = max(n for n, task in enumerate(drawn) if task == 0)
    rest = drawn[last + 1 :]
    assert drawn.count(0) == 45 and last < 54
    assert all(abs(rest[:n].count(1) - 0.7 * n) < 1 for n in range(len(rest)))


@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_follow_the_pass_rates_and_a_restart_continues_them(staleness):
    """What each task is drawn stays near the sum of its shares, whatever the rates; none of them starves."""
    kinds = [PassRateWeight(by="pass_rate", most=1 + i, least=0.05) for i in range(5)]

    def begun():
        return mixture((*kinds, 0.5), rows=(5,) * 6, epochs=(None,) * 6, staleness=staleness)

    whole, chance, state = begun(), random.Random(1), TrainState()
    rates = [[chance.choice([0.0, 0.0, 0.5, 1.0]) if n % 40 < 20 else i / 5 for i in range(6)] for n in range(150)]
    drawn, wanted, weights, saved = [], [0.0] * 6, [[1.0, 2, 3, 4, 5, 0.5]] * (1 + staleness), []
    requested = {place: one for *one, place in seen(whole.peek(8 * (1 + staleness)))}
    for step, of_step in enumerate(rates):
        prompts = whole.next(8)
        assert [requested[place] for *_, place in seen(prompts)] == [one for *one, _ in seen(prompts)]
        drawn += [int(prompt.task[1:]) for prompt in prompts]
        shares = [weight / sum(weights[step]) for weight in weights[step]]
        wanted = [want + 8 * share for want, share in zip(wanted, shares, strict=True)]
        assert all(abs(drawn.count(i) - want) < 1.5 for i, want in enumerate(wanted)), step
        metrics = whole.learn({p.prompt_id: of_step[int(p.task[1:])] for p in prompts})
        weights.append([*(metrics[f"tasks/t{i}/weight"] for i in range(5)), 0.5])
        for *one, place in seen(whole.peek(8 * max(1, staleness))):
            assert requested.setdefault(place, one) == one
        whole.store(state)
        saved.append(json.dumps(vars(state)))
    assert min(map(min, weights)) == 0.05 and max(map(max, weights)) == 5
    for step in (0, 1, 60, 61, 137):
        again = begun()
        again.restore(TrainState(**json.loads(saved[step])))
        for of_step in rates[step + 1 :]:
            prompts = again.next(8)
            place = 8 * (step := step + 1)
            assert [int(prompt.task[1:]) for prompt in prompts] == drawn[place : place + 8]
            again.learn({p.prompt_id: of_step[int(p.task[1:])] for p in prompts})


def mixture(weights=(2, 1), rows=(5, 3), curriculum=(), epochs=(None, None), staleness=0):
    data = DataSection(train={"source": "a.jsonl"}, curriculum=list(curriculum))
    orders = [PromptOrder(range(number), data, seed=i) for i, number in enumerate(rows)]
    config = type("Config", (), {"data": data, "rollout": RolloutSection(prompts_per_step=8, max_staleness=staleness)})
    pairs = enumerate(zip(weights, epochs, strict=False))
    return Mixture([Task(f"t{i}", weight, config, {}, passes) for i, (weight, passes) in pairs], orders, seed=0)


def seen(prompts):
    return [(prompt.task, prompt.prompt_id, prompt.position) for prompt in prompts]


def test_each_task_is_drawn_in_its_own_order_and_its_rows_are_numbered_after_those_before():
    drawn, alone = mixture().next(30), PromptOrder(range(3), DataSection(train={"source": "a.jsonl"}), seed=1)
    assert [p.prompt_id - 5 for p in drawn if p.task == "t1"] == [p.prompt_id for p in alone.next(10)]
    assert [p.position for p in drawn] == list(range(30))
    assert {p.prompt_id for p in drawn if p.task == "t0"} == {0, 1, 2, 3, 4}


def test_what_is_peeked_is_drawn_and_a_restart_continues_it():
    whole = seen(mixture().next(40))
    first = mixture()
    assert seen(first.peek(9)) == whole[:9] == seen(first.next(9))
    state = TrainState()
    first.store(state)
    again = mixture()
    again.restore(state)
    assert seen(again.peek(4)) == whole[9:13] and seen(again.next(31)) == whole[9:]


def test_a_task_with_epochs_ends_also_in_a_restarted_run():
    first = mixture(epochs=(1.5, None))
    whole, state = seen(first.next(10)), TrainState()
    first.store(state)
    again = mixture(epochs=(1.5, None))
    again.restore(state)
    assert seen(again.next(20)) == seen(first.next(20)) and [task for task, _, _ in whole].count("t0") < 8
    assert all(prompt.task == "t1" for prompt in again.next(5))


def test_very_many_rows_are_permuted_without_a_list():
    order = PromptOrder(range(10**8), DataSection(train={"source": "a.jsonl"}), seed=3)
    drawn = [prompt.prompt_id for prompt in order.next(2000)]
    assert len({*drawn}) == 2000 and abs(sum(drawn) / 2000 / 10**8 - 0.5) < 0.03
    again = PromptOrder(range(10**8), DataSection(train={"source": "a.jsonl"}), seed=3)
    again.cursor = 1990
    assert [prompt.prompt_id for prompt in again.next(10)] == drawn[1990:]
    for rows in (1, 2, 3, 5, 64, 1000):
        assert sorted(RowPermutation(range(rows), "0/1")) == list(range(rows))
    orders = {tuple(RowPermutation(range(5), f"{seed}/0")) for seed in range(2000)}
    assert len(orders) == 120  # every order of five rows occurs


def test_a_curriculum_rests_the_prompts_of_its_task_alone():
    mixed = mixture(curriculum=(0.1, 0.9))
    drawn = mixed.next(12)
    metrics = mixed.learn({p.prompt_id: 1.0 if p.prompt_id == 0 else 0.5 for p in drawn})
    assert metrics["tasks/t0/curriculum/resting"] == 1 and metrics["tasks/t1/curriculum/resting"] == 0
    assert 0 not in {p.prompt_id for p in mixed.next(20)}


def test_other_tasks_are_refused_and_other_weights_count_anew():
    state, first = TrainState(), mixture()
    first.next(7)
    first.store(state)
    with pytest.raises(
        ConfigError, match=r"^tasks: the checkpoint has the tasks t0, t1, and the config t0; name the same"
    ):
        mixture((1,), (5,)).restore(state)
    other = mixture((1, 1))
    other.restore(state)
    assert [p.task for p in other.next(4)].count("t0") == 2
