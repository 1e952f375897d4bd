"""Prompts with too high or too low pass rates rest, and come back."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from megagrpo.config import DataSection, DatasetSection
from megagrpo.data.prompts import PromptSource
from megagrpo.data.sources.data_identity import DataIdentity
from megagrpo.data.tokens.tokenizer import Tokenizer as HuggingFaceTokenizer
from megagrpo.records.writer import MetricsWriter
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.saving.data_change import compare
from megagrpo.trainer.saving.saves import Saves
from megagrpo.trainer.saving.time_limit import TimeLimit

RATES = {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.25}  # of four prompts; 0 and 2 are outside the band
ON = {"curriculum": [0.1, 0.9], "curriculum_rest": 2, "shuffle": False}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A source of four prompts in the order of the data set, or shuffled by the seed."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(4)))
    raw = RawTokenizer(models.WordLevel({str(n): n for n in range(10)}, unk_token="0"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw))

    def source(**data):
        config = DataSection(train={"source": str(path)}, **data)
        return PromptSource(config.train, config, tokenizer, 10, 0)

    return source


def epoch(source, rates=RATES, steps=2, size=2):
    """Draw `steps` steps and report their pass rates; return the prompts by number."""
    drawn = []
    for _ in range(steps):
        prompts = [prompt.prompt_id for prompt in source.next(size)]
        source.learn({i: rates[i] for i in prompts})
        drawn += prompts
    return drawn


def test_prompts_outside_of_the_band_rest_for_their_epochs_and_are_tried_again(make):
    source = make(**ON)
    assert epoch(source) == [0, 1, 2, 3]
    assert epoch(source) == [1, 3, 1, 3]  # epochs 1 and 2
    assert source.cursor == 12
    assert epoch(source, RATES | {0: 0.5}) == [0, 1, 2, 3]  # epoch 3
    assert epoch(source, RATES | {0: 0.5}, steps=1, size=3) == [0, 1, 3]


def test_off_draws_all_of_them_every_time(make):
    source = make(shuffle=False)
    assert epoch(source, steps=4) == [0, 1, 2, 3] * 2 and source.curriculum.history == []


@pytest.mark.parametrize(
    ("band", "second"),
    [([0.0, 0.9], [0, 1, 3, 0]), ([0.1, 1.0], [1, 2, 3, 1]), ([0.3, 0.9], [1, 1, 0, 1])],
)
def test_the_band_is_inclusive(make, band, second):
    source = make(**ON | {"curriculum": band})
    epoch(source)
    assert epoch(source) == second


def test_a_source_with_everyone_at_rest_waits_for_the_first_to_come_back(make):
    source = make(**ON)
    everyone_fails = dict.fromkeys(range(4), 0.0)
    assert epoch(source, everyone_fails) == [0, 1, 2, 3]
    assert source.learn({}) == {"curriculum/resting": 4, "curriculum/pass_rate": 0}
    assert epoch(source, everyone_fails) == [0, 1, 2, 3] and source.cursor == 16


def test_a_prompt_without_a_recorded_result_is_drawn(make):
    source = make(**ON)
    source.next(4)
    source.learn({1: 1.0})
    assert [prompt.prompt_id for prompt in source.next(3)] == [0, 2, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_cursor_and_history_are_the_whole_state(make, shuffle):
    options = ON | {"shuffle": shuffle}
    whole, first, second = make(**options), make(**options), make(**options)
    expected = epoch(whole, steps=10)
    drawn = epoch(first, steps=4)
    state = json.loads(json.dumps([first.cursor, first.curriculum.history]))  # as in a checkpoint
    second.cursor, second.curriculum.history = state
    assert drawn + epoch(second, steps=6) == expected and second.curriculum.history == whole.curriculum.history


class KeptState:
    """A checkpointer that keeps the state in memory."""

    def start(self, state, background, ahead):
        self.state = state

    def finish(self, wait):
        return None

    def load(self, path):
        return self.state


def saves_of(prompts, checkpointer):
    """The checkpoints of a run without policy and engine, at its first step."""
    collector = SimpleNamespace(finished_ahead=list, restore_ahead=lambda *_: None)
    time_limit, writer = TimeLimit(None, print), MetricsWriter.silent()
    return Saves(checkpointer, TrainState(), prompts, collector, GpuTurns(), time_limit, writer, background=False)


def test_a_trainer_that_resumes_rests_the_prompts_that_rested_when_it_was_saved(make):
    checkpointer, prompts = KeptState(), make(**ON)
    prompts.next(4)
    prompts.learn(RATES)
    saving = saves_of(prompts, checkpointer)
    saving.state.step = 1
    prompts.store(saving.state)
    saving.save(must_succeed=False)
    resumed = make(**ON)
    saves_of(resumed, checkpointer).restore(Path("step_000001"))
    assert resumed.curriculum.history == prompts.curriculum.history != []
    assert [p.prompt_id for p in resumed.next(4)] == [p.prompt_id for p in prompts.next(4)] == [1, 3, 1, 3]


def test_a_resumed_run_asks_before_it_draws_from_other_data(make):
    state, path = TrainState(step=1), Path("step_000001")
    make().store(state)
    assert compare(make(), state, path, resume=True) is None
    now = r"data\.train is \S+ train \(4 rows, checksum [0-9a-f]{16}\); step_000001 was written with "
    for saved, kept, action in (
        ({"name": "old.jsonl", "rows": 3, "checksum": "abc"}, 0, "the epoch begins again with its rows"),
        (begin_of(make(), 3), 3, "its new rows join the epoch in progress"),
    ):
        old = replace(state, data=state.data | saved)
        with pytest.raises(
            ValueError, match=rf"^run\.resume: {now}.* \(3 rows, checksum \w+\)\. .*other_data, so that {action}$"
        ):
            compare(make(), old, path, resume=True)
        change = compare(make(), old, path, resume="other_data")
        assert change.kept == kept and change.note.endswith(f": {action} (run.resume)")
        with pytest.raises(ValueError, match=r"^data\.source: .*; continue with the same data, or start a new run"):
            compare(make(), replace(old, source="a state"), path, resume="other_data")


def begin_of(prompts, rows):
    """What a checkpoint holds of the first rows of a data set."""
    identity = DataIdentity(DatasetSection(source="old.jsonl"))
    for row in range(rows):
        identity.add(prompts.row(row))
    return identity.state()


def test_a_step_that_a_signal_ends_before_training_leaves_no_pass_rates_in_the_checkpoint(make):
    checkpointer, prompts = KeptState(), make(**ON)
    prompts.next(4)
    prompts.learn(RATES)
    saving = saves_of(prompts, checkpointer)
    saving.state.step = 1
    prompts.store(saving.state)
    prompts.next(4)
    prompts.learn({1: 0.0, 3: 0.0})  # of step 2, which is drawn again
    saving.save(must_succeed=False)
    resumed = make(**ON)
    saves_of(resumed, checkpointer).restore(Path("step_000001"))
    assert [p.prompt_id for p in resumed.next(4)] == [1, 3, 1, 3]
