"""A user's data source: rank 0 chooses the prompts of all ranks, learns of their groups, and resumes where it was."""

import json
import shutil

import pytest
from ranks import run_ranks
from tiny_policy import tiny_run
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from megagrpo.config import ConfigError, RunConfig
from megagrpo.config.io import shipped_configs
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.sources.task_mixture import Mixture
from megagrpo.data.tokens.tokenizer import Tokenizer as HuggingFaceTokenizer
from megagrpo.engine.http.protocol import EngineError
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.train_types import TrainState
from megagrpo.trainer.rollout.collector import NoRollouts
from megagrpo.trainer.rollout.groups import Rollouts
from megagrpo.trainer.rollout.sourced_prompts import SourcedPrompts
from megagrpo.types import Rollout, ScoredRollout
from tests.rank_fakes import OneRank

SOURCES = '''
"""Data sources of the tests."""

import random

import numpy


class Walk:
    """Rows in an order that depends on every reward so far; each third one is new."""

    def __init__(self, rows, seed, stride=1):
        self.rows, self.random, self.stride = rows, random.Random(seed), stride
        self.count, self.rates = 0, {}

    def next(self, count, progress):
        return [self.one(progress) for _ in range(count)]

    def one(self, progress):
        self.count += self.stride
        if self.count % 3 == 0:
            return {"prompt": f"new {self.count} {progress.step}", "answer": str(self.count)}
        worst = sorted(self.rows, key=lambda row: (self.rates.get(row, 0.5), self.random.random()))
        return worst[0]

    def learn(self, groups, progress):
        for group in groups:
            if isinstance(group.row, int):
                self.rates[group.row] = group.mean
            else:
                assert group.row["prompt"].startswith("new") and group.prompt_id >= len(self.rows)
        return {"known": len(self.rates)}

    def state_dict(self):
        return {"count": self.count, "rates": self.rates, "random": self.random.getstate()}

    def load_state_dict(self, state):
        self.count, self.rates = state["count"], state["rates"]
        self.random.setstate(state["random"])


class Keeps(Walk):
    def keep(self, group):
        return group.rewards[0] == 1.0 and group.by_function["exact"] == [1.0, None] and group.lengths == [2, 2]


class Plain:
    def __init__(self, rows, seed):
        self.rows = rows

    def next(self, count, progress):
        return list(self.rows)[:count]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Short(Plain):
    def next(self, count, progress):
        return [0]


class Many(Plain):
    def next(self, count, progress):
        return [0] * (count + 1)


class Unknown(Plain):
    def next(self, count, progress):
        return [numpy.int64(99)] * count


class Text(Plain):
    def next(self, count, progress):
        return ["0"] * count


class Long(Plain):
    def next(self, count, progress):
        return [{"prompt": "x" * 200}] * count


class Bare(Plain):
    def next(self, count, progress):
        return [{"question": "x"}] * count


class Raises(Plain):
    def next(self, count, progress):
        return {}["nothing"]


class Scalars(Plain):
    def state_dict(self):
        return {"mean": numpy.float64(0.5)}


class Stateless:
    def __init__(self, rows, seed):
        pass

    def next(self, count, progress):
        return []


class Shy(Plain):
    def next(self):
        return []


def function():
    pass
'''
ROWS = [{"prompt": "x" * (1 if n != 2 else 90), "answer": str(n)} for n in range(7)]  # row 2 is too long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sources")
    (made / "sources.py").write_text(SOURCES)
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


def config_of(folder, name, algorithm=None, **data):
    train = {"source": str(folder / "rows.jsonl")}
    section = {"train": train, "source": f"{folder}/sources.py:{name}", **data}
    return tiny_run(data=section, algorithm=algorithm or {}, run={"max_steps": 9})


def contents(config) -> PromptSource:
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(map(chr, range(32, 127)))}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token=" "))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="~")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    return PromptSource(config.data.train, config.data, HuggingFaceTokenizer(fast), 40, 0)


def sourced(folder, name="Walk", layout=None, **options) -> SourcedPrompts:
    config = config_of(folder, name, **options)
    return SourcedPrompts(contents(config), layout or OneRank(), config)


def scored(prompts, rewards=lambda prompt: (1.0, None)):
    """Groups of two responses of two tokens to each prompt."""
    return StepSamples.of(
        [
            ScoredRollout(
                Rollout(prompt, (3, 2), (-1.0, -1.0), "stop", 1, ""),
                {"exact": reward},
                float("nan") if reward is None else reward,
            )
            for prompt in prompts
            for reward in rewards(prompt)
        ]
    )


def by_id(prompt):
    return prompt.prompt_id % 3 / 2, prompt.prompt_id % 2


def steps(prompts, state, number, ahead=0, size=4):
    """The (prompt_id, place, text, answer) of the prompts of `number` steps."""
    drawn = []
    for _ in range(number):
        prompts.peek(size * (1 + ahead))
        of_step = prompts.next(size)
        prompts.tell(scored(of_step, by_id), 2)
        prompts.peek(size * ahead)
        state.step += 1
        prompts.store(state)
        drawn += [(p.prompt_id, p.position, p.messages, p.columns.get("answer")) for p in of_step]
    return drawn


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_resumed_source_goes_on_as_if_never_interrupted(folder, ahead):
    whole, state = sourced(folder), TrainState()
    expected = steps(whole, state, 9, ahead)
    assert [place for _, place, _, _ in expected] == list(range(36)) and {len(ROWS), 2} & {
        row[0] for row in expected
    } == set()
    assert {row[0] >= len(ROWS) for row in expected} == {True, False} and len({row[2] for row in expected}) > 12
    for stop in (1, 4, 8):
        first, halted = sourced(folder), TrainState()
        before = steps(first, halted, stop, ahead)
        saved = TrainState(**json.loads(json.dumps(vars(halted))))  # as in a checkpoint
        first.next(4), first.tell(scored(first.next(3)), 2)  # of a step that a signal ends
        resumed = sourced(folder)
        resumed.restore(saved)
        assert before + steps(resumed, saved, 9 - stop, ahead) == expected


def test_what_a_source_gets_are_the_usable_rows_and_its_arguments(folder):
    prompts = sourced(folder, source_args={"stride": 3})
    assert [p.messages for p in prompts.next(2)] == ["new 3 0", "new 6 0"]
    rows = prompts._source.rows
    assert list(rows) == [0, 1, 3, 4, 5, 6] and rows[3] == ROWS[3] and len(rows) == len(prompts) == 6 and 2 not in rows
    with pytest.raises(KeyError):
        rows[2]


def test_a_source_decides_which_groups_dynamic_sampling_keeps_and_its_numbers_are_metrics(folder):
    prompts = sourced(folder, "Keeps", algorithm={"dynamic_sample": True})
    drawn = prompts.next(6)
    samples = scored(drawn, lambda prompt: (float(prompt.position % 2), None))
    assert prompts.keeps and prompts.kept(samples, 2).tolist() == [1, 3, 5]
    assert prompts.tell(samples, 2) == {"source/known": len({p.prompt_id for p in drawn if p.prompt_id < len(ROWS)})}


def mixed(folder, name="Walk", **algorithm):
    """(order, rollouts) of a run with a task whose rows a source chooses, between two that draw rows in order."""
    own = config_of(folder, name, algorithm=algorithm).model_dump(exclude={"tasks"})
    train = {"train": own["data"]["train"]}
    data = {"plain": train, "walk": train | {"source": own["data"]["source"]}, "last": train}
    run = own | {"data": own["data"] | {"source": None}, "rollout": own["rollout"] | {"num_generations": 2}}
    config = RunConfig.model_validate(run | {"tasks": [{"name": task, "data": one} for task, one in data.items()]})
    orders = [contents(task.config) for task in config.each_task]
    mixture = Mixture(config.each_task, orders, seed=0)
    mixture.sourced(lambda task, order, first: SourcedPrompts(order, OneRank(), task.config, "k", first))
    sources = {"walk": mixture.orders[1]}
    return mixture, Rollouts(config, mixture, None, None, TrainState(), print, sources)


def test_a_source_of_a_task_chooses_the_rows_of_its_task_and_a_restart_continues_it(folder):
    def drawn(mixture, rollouts, state, number):
        found = []
        for _ in range(number):
            of_step = mixture.next(6)
            of_walk = rollouts._of_task(scored(of_step, lambda p: (p.prompt_id % 7 % 2, 0)), "walk")
            assert {p.task for p in of_walk.prompts} == {"walk"} and len(of_walk) == 4
            rollouts.sources["walk"].tell(of_walk, 2)
            mixture.learn({p.prompt_id: 0.5 for p in of_step})
            state.step += 1
            mixture.store(state)
            found += [(p.task, p.prompt_id, p.position, p.messages) for p in of_step]
        return found

    mixture, rollouts = mixed(folder)
    expected = drawn(mixture, rollouts, TrainState(), 9)
    assert {*rollouts.sources["walk"]._source.rates} <= {*range(7)}
    numbers = {name: {number for task, number, _, _ in expected if task == name} for name in ("plain", "walk", "last")}
    assert max(numbers["plain"]) < 7 <= min(numbers["walk"]) and 14 < max(numbers["walk"]) < 2**40 < min(
        numbers["last"]
    )
    assert any(message.startswith("new") for _, _, _, message in expected)
    state = TrainState()
    before = drawn(*mixed(folder), state, 4)
    again, saved = mixed(folder), TrainState(**json.loads(json.dumps(vars(state))))
    again[0].restore(saved)
    assert before + drawn(*again, saved, 5) == expected


def test_a_source_decides_about_the_groups_of_its_task_alone(folder):
    mixture, rollouts = mixed(folder, "Keeps", dynamic_sample=True)
    samples = scored(
        mixture.next(12), lambda p: (1.0, None) if p.task == "walk" and p.position % 4 == 0 else (0.0, 1.0)
    )
    kept = rollouts._useful_groups(samples)
    walks = [group for group in range(12) if samples.prompts[2 * group].task == "walk"]
    assert sorted({*range(12)} - {*walks}) == [g for g in kept.tolist() if g not in walks]  # all differ
    assert [g for g in kept.tolist() if g in walks] == [g for g in walks if g % 4 == 0]


@pytest.mark.parametrize("name", ["Buffer", "EasyFirst"])
def test_the_sources_of_the_example_never_run_dry(folder, name, tmp_path):
    """prime-rl 2667: a pool from which prompts only leave is empty one day."""
    shutil.copy(shipped_configs() / "examples" / "data_source" / "sources.py", tmp_path / "sources.py")
    shutil.copy(folder / "rows.jsonl", tmp_path / "rows.jsonl")
    for rewards in ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (None, None), (None, 1.0)):
        prompts, seen = sourced(tmp_path, name), set()
        for _ in range(20):
            drawn = prompts.next(4)
            seen |= {prompt.prompt_id for prompt in drawn}
            prompts.tell(scored(drawn, lambda prompt, rewards=rewards: rewards), 2)
            prompts.store(TrainState())
        assert len(seen) == (6 if name == "Buffer" or rewards[1] else 4)
        assert len(sourced(tmp_path, name).next(20)) == 20  # more than there are rows


FAILURES = {
    "Short": "next returned 1 of 2 rows; return as many as it is asked for",
    "Many": "next returned 3 of 2 rows; return as many as it is asked for",
    "Unknown": "next returned row 99, but `rows` has no such row, only 6 others",
    "Text": "next returned '0'; return numbers of rows, or dicts with the columns of new rows",
    "Long": "next returned only rows that are bad or longer than rollout.max_prompt_length, 100 times",
    "Bare": "next raised ValueError: data.train: row 7 has no `prompt` (data.prompt_column)",
    "Raises": "next raised KeyError: 'nothing' (",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_source_that_returns_what_a_run_cannot_use_ends_the_run_and_is_named(folder, name):
    with pytest.raises(NoRollouts) as raised:
        sourced(folder, name).next(2)
    assert str(raised.value).startswith(f"data.source: `{folder}/sources.py:{name}`: {FAILURES[name]}")


def test_a_long_new_row_is_truncated_or_an_error_as_configured(folder):
    prompts = sourced(folder, "Long", overlong_prompts="truncate_left")
    assert [len(p.token_ids) for p in prompts.next(2)] == [40, 40]


def test_a_state_that_a_checkpoint_cannot_hold_is_an_error_of_the_first_step_that_does_not_save(folder):
    prompts = sourced(folder, "Scalars")
    with pytest.raises(EngineError, match=r"multiarray\.scalar, which a checkpoint cannot hold") as raised:
        prompts.store(TrainState(step=1))
    assert not isinstance(raised.value, NoRollouts)


def test_other_data_or_no_source_cannot_continue_and_a_new_source_begins_at_its_start(folder, tmp_path):
    state = TrainState()
    steps(sourced(folder), state, 2)
    (tmp_path / "sources.py").write_text(SOURCES)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    with pytest.raises(ConfigError, match="has 4 usable rows, and had 6 when the checkpoint was written"):
        sourced(tmp_path).restore(state)
    with pytest.raises(ConfigError, match="has the state of a data source; name its class again"):
        contents(config_of(folder, "Walk")).restore(state)
    prompts = sourced(folder)
    prompts.restore(TrainState(step=3, cursor=12))
    assert [(p.prompt_id >= len(ROWS), p.position) for p in prompts.next(3)] == [(False, 12), (False, 13), (True, 14)]


REFUSED = {
    "Stateless": "does not define state_dict, load_state_dict; add the method: docs/data_source.md",
    "Keeps": "defines keep, which a run calls only with algorithm.dynamic_sample: true; set it, or remove keep",
    "Shy": "cannot be called: next: too many positional arguments; see docs/data_source.md",
    "function": "is not a class; name a class with the method next: docs/data_source.md",
    "Missing": "cannot be loaded: AttributeError: ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_be_used_is_refused_before_the_run(folder, name):
    with pytest.raises(ValueError) as raised:
        sourced(folder, name)
    assert str(raised.value).startswith(f"data.source: `{folder}/sources.py:{name}` {REFUSED[name]}")
    with pytest.raises(ValueError, match="cannot be constructed: got an unexpected keyword argument 'size'; correct"):
        sourced(folder, "Plain", source_args={"size": 2})


def test_every_rank_draws_what_rank_0_chooses_and_a_failure_there_is_raised_everywhere(folder):
    leaders = run_ranks(_draws, 4, folder, timeout=200)
    for drawn, failed in leaders:
        assert [row[:2] for row in drawn] == [row[:2] for row in leaders[0][0]]
        assert "sources.py:Raises`: next raised KeyError: 'nothing'" in failed
    assert leaders[1][0] == leaders[0][0] and leaders[0][0][2][2].startswith("new")  # rank 1 leads the second replica
    assert leaders[2][0][2][2] == ""  # no leader: no content


def _draws(folder):
    """Four ranks as two replicas of two pipeline stages."""
    config = config_of(folder, "Walk")
    layout = init_layout(config.parallel.model_copy(update={"pp": 2}))

    def prompts_of(config):
        order = contents(config)
        return SourcedPrompts(order if layout.is_dp_leader else PromptOrder(order.rows, config.data, 0), layout, config)

    drawn = steps(prompts_of(config), TrainState(), 4)
    with pytest.raises(NoRollouts) as raised:
        prompts_of(config_of(folder, "Raises")).next(2)
    return drawn, str(raised.value)
