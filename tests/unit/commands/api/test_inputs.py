"""Python objects of a run: functions and callbacks as files that workers import, data as files that the run reads."""

import datetime
import functools
import threading
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow
import pytest

import megagrpo
from megagrpo.commands.api.inputs.call_inputs import CALLBACKS, REWARDS, collect
from megagrpo.config import ConfigError, RewardsSection, RunConfig
from megagrpo.config.basics.yaml_text import parse_yaml
from megagrpo.data.sources.data_sources import load_rows
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.callbacks import load_callbacks
from megagrpo.types import Prompt, Rollout

ROWS = [{"prompt": "What is 1 + 2?", "answer": 3}, {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": 2}]
MINIMAL = {
    "model": {"path": "m"},
    "data": {"train": {"source": "org/data"}},
    "rewards": {"functions": [{"function": "format"}]},
}


def overrides(inputs, folder, callbacks=()):
    """The overrides of inputs as key -> value."""
    pairs = [text.partition("=") for text in inputs.overrides(folder, list(callbacks))]
    return {key: parse_yaml(text, key) for key, _, text in pairs}


def config(**sections):
    return RunConfig.model_validate(MINIMAL | sections)


# ----------------------------------------------------------------------------------------------------- reward functions


def rewards_of_every_kind():
    weights = {"a": 2.0}

    def closure(completions):
        assert megagrpo.__name__ == "megagrpo"  # the package itself is pickled by name
        return [weights["a"] * len(text) for text in completions]

    async def waits(completions, answer):
        return [float(each) for each in answer]

    def scaled(completions, factor):
        return [factor] * len(completions)

    class Constructed:
        def __init__(self, value=7.0):
            self.value = value

        def __call__(self, completions):
            return [self.value] * len(completions)

    class Stateful:
        def __init__(self, start):
            self.calls = start

        def __call__(self, completions):
            self.calls += 1
            return [float(self.calls)] * len(completions)

    return [
        closure,
        waits,
        lambda completions: [1.5] * len(completions),
        functools.partial(scaled, factor=4.0),
        {"function": Constructed, "args": {"value": 9.0}, "weight": 0.5},
        Stateful(10),
        lambda completions: [None] * len(completions),
        "format",
    ]


def test_functions_of_every_kind_score_in_workers(tmp_path):
    inputs = collect(rewards_of_every_kind(), None, None, None)
    sections = overrides(inputs, inputs.write(tmp_path))["rewards.functions"]
    names = ["closure", "waits", "lambda_function", "scaled", "Constructed", "Stateful", "lambda_function_2"]
    assert [section["function"].rpartition(":")[2] for section in sections] == [*names, "format"]
    rollouts = [
        Rollout(Prompt(i, (1,), "q", {"answer": i}), (2,), (0.0,), "stop", 0, text)
        for i, text in enumerate(("a", "bcd"))
    ]
    section = RewardsSection.model_validate({"workers": 1, "functions": sections})
    with RewardScorer(section, 10) as scorer:
        scored = scorer.score(rollouts)
        again = scorer.score(rollouts)
    assert [s.rewards["closure"] for s in scored] == [2.0, 6.0] and [s.rewards["waits"] for s in scored] == [0.0, 1.0]
    constant = {"lambda_function": 1.5, "scaled": 4.0, "Constructed": 9.0, "lambda_function_2": None}
    assert [{name: s.rewards[name] for name in constant} for s in scored] == [constant, constant]
    # the state lives as long as the worker
    assert [s.rewards["Stateful"] for s in scored + again] == [11.0, 12.0, 13.0, 14.0]


def test_the_same_objects_have_the_same_folder_and_a_change_has_another(tmp_path):
    def reward(completions):
        return [0.0]

    one, again, other = (collect(f, ROWS, None, None).write(tmp_path) for f in (reward, [reward], [reward, "format"]))
    assert one == again and one.parent == tmp_path / "from_python"
    assert {path.name for path in one.iterdir()} == {REWARDS, "megagrpo_rewards.pkl", "train.jsonl"}
    assert collect(reward, ROWS[:1], None, None).write(tmp_path) != one
    assert other.exists() and not list((tmp_path / "from_python").glob(".partial*"))


def test_names_and_settings_of_functions_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = collect(["accuracy", {"function": "own.py:f", "weight": 2}], None, None, None)
    assert not made.to_write
    expected = [{"function": "accuracy"}, {"function": f"{tmp_path}/own.py:f", "weight": 2}]
    assert overrides(made, tmp_path)["rewards.functions"] == expected
    assert "rewards.functions" not in overrides(collect(None, None, None, None), tmp_path)


def test_a_function_may_have_the_name_of_a_built_in(tmp_path):
    def format(completions):
        return [0.25]

    first, second = overrides(collect(["format", format], None, None, None), tmp_path)["rewards.functions"]
    assert first == {"function": "format"} and second == {"function": f"{tmp_path}/{REWARDS}:format"}


def test_a_module_beside_the_caller_is_found_by_the_worker(tmp_path, monkeypatch):
    (tmp_path / "helpers_of_a_user.py").write_text("def half(completions):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    from helpers_of_a_user import half

    section = overrides(made := collect(half, None, None, None), made.write(tmp_path / "run"))["rewards.functions"]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    rollout = Rollout(Prompt(0, (1,), "q", {}), (2,), (0.0,), "stop", 0, "a")
    with RewardScorer(RewardsSection.model_validate({"workers": 1, "functions": section}), 10) as scorer:
        assert scorer.score([rollout])[0].rewards == {"half": 0.5}


def test_what_is_no_function_or_cannot_be_sent_is_an_error_that_names_it():
    import torch

    lock = threading.Lock()
    for given, message in (
        (3, "reward_functions.0: must be a function, a name such as accuracy"),
        (["format", None], "reward_functions.1: must be a function"),
        ([{"weight": 2}], r"reward_functions.0: must be a function, .* \(got {'weight': 2}\)"),
        (
            lambda completions: lock,
            "reward_functions.0: `<lambda>` cannot be sent to the run's processes: TypeError: .*lock",
        ),
        (
            [torch.nn.Linear(1, 1)],
            "reward_functions.0: a Linear is a model, not a function; save it and pass model:FOLDER",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            collect(given, None, None, None)


# ------------------------------------------------------------------------------------------------------------ callbacks


def test_callbacks_follow_the_config_s_as_classes_and_as_objects(tmp_path):
    class Watch:
        def __init__(self, word="made"):
            self.word = word

        def on_step_end(self, config, state, control):
            return self.word

    inputs = collect(None, None, None, [Watch, Watch("given"), f"{__file__}:Here"])
    folder = inputs.write(tmp_path)
    names = overrides(inputs, folder, ["mine.py:Own"])["run.callbacks"]
    assert names == ["mine.py:Own", f"{folder / CALLBACKS}:Watch", f"{folder / CALLBACKS}:Watch_2", f"{__file__}:Here"]
    loaded = load_callbacks(names[1:3])
    assert [callback.on_step_end(None, None, None) for callback in loaded] == ["made", "given"]
    assert inputs.overrides(folder) == []  # without the config's callbacks there is no list to extend


def test_a_callback_without_a_pickle_is_an_error():
    class Holds:
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(ConfigError, match=r"callbacks.1: `Holds` cannot be sent to the run's processes"):
        collect(None, None, None, [Holds, Holds()])


# ----------------------------------------------------------------------------------------------------------------- data


def read(inputs, tmp_path, key="data.train"):
    source = overrides(inputs, inputs.write(tmp_path))[key]["source"]
    section = config(data={"train": {"source": source}}).data.train
    return list(load_rows(section, key, 0, "prompt"))


def test_rows_of_every_kind_arrive_with_their_columns(tmp_path):
    texts = [{"prompt": "one", "answer": 1, "tags": ["a", "b"]}, {"prompt": "two", "answer": 2, "tags": []}]
    for kind in (texts, tuple(texts), datasets.Dataset.from_list(texts), pandas.DataFrame(texts, index=[7, 9])):
        inputs = collect(None, kind, None, None)
        inputs.check_rows(config())
        assert read(inputs, tmp_path) == texts

    class FromElsewhere:
        """A table of another library, polars for example, as its Arrow interface shows it."""

        def __arrow_c_stream__(self, requested_schema=None):
            return pyarrow.Table.from_pylist(texts).__arrow_c_stream__(requested_schema)

    for table in (pyarrow.Table.from_pylist(texts), FromElsewhere()):
        assert read(collect(None, table, None, None), tmp_path) == texts
    kept = datasets.Dataset.from_list(texts).filter(lambda row: row["answer"] == 2)
    assert read(collect(None, kept, None, None), tmp_path) == texts[1:]
    numbers = [{"prompt": "p", "answer": np.int64(3), "vector": np.array([1, 2])}]
    assert read(collect(None, numbers, None, None), tmp_path) == [{"prompt": "p", "answer": 3, "vector": [1, 2]}]


def test_a_list_of_dicts_keeps_the_type_of_every_value(tmp_path):
    texts = [
        {"prompt": "p", "answer": 10**30, "day": "2024-01-01", "mixed": 1, "info": {"a": None}, "flag": True},
        {"prompt": "q", "answer": -0.5, "day": None, "mixed": "1", "info": {"b": [1, "x", 2.0]}, "flag": "True"},
        {"prompt": "r", "answer": float("inf"), "day": "\ud800", "mixed": [], "info": {}, "flag": ""},
    ]
    found = read(collect(None, texts, None, None), tmp_path)
    assert found == texts and [list(map(type, row.values())) for row in found] == [
        list(map(type, row.values())) for row in texts
    ]


def test_held_out_rows_have_their_own_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = overrides(collect(None, None, ROWS, None), tmp_path)
    assert one == {"data.eval": {"source": str(tmp_path / "eval.jsonl")}}
    named = collect(None, "./mine.jsonl", {"easy": ROWS, "hard": "org/hard"}, None)
    assert overrides(named, tmp_path) == {
        "data.train": {"source": str(tmp_path / "mine.jsonl")},
        "evaluation.sets.easy": {"source": str(tmp_path / "eval_easy.jsonl")},
        "evaluation.sets.hard": {"source": "org/hard"},
    }


def test_progress_bars_of_datasets_stay_as_they_were(tmp_path):
    was = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    try:
        collect(None, datasets.Dataset.from_list([{"prompt": "p"}]), None, None).write(tmp_path)
        assert not datasets.are_progress_bars_disabled()
    finally:
        if was:
            datasets.disable_progress_bars()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "dataset: has no rows; pass at least one prompt"),
        (datasets.Dataset.from_list([]), "dataset: has no rows"),
        (
            [{"promt": "x"}],
            r"dataset: row 0 has no column `prompt` \(data.prompt_column\); it has promt; did you mean `promt`\?; "
            r"rename",
        ),
        ([{"prompt": "x"}, {"answer": 1}], "dataset: row 1 has no column `prompt`"),
        (
            datasets.Dataset.from_dict({"question": ["x"]}),
            r"dataset: has no column `prompt` \(data.prompt_column\); it has question",
        ),
        (["x"], r"dataset: row 0 must be a dict of columns \(got str\)"),
    ],
)
def test_rows_that_are_no_prompts_are_an_error(rows, message):
    with pytest.raises(ConfigError, match=message):
        collect(None, rows, None, None).check_rows(config())


def test_a_set_may_have_its_own_prompt_column():
    held_out = collect(None, [{"q": "x"}], {"own": [{"q": "x"}]}, None)
    given = {"data": MINIMAL["data"] | {"prompt_column": "q"}}
    held_out.check_rows(config(**given, evaluation={"sets": {"own": {"source": "x"}}}))
    with pytest.raises(ConfigError, match=r"eval_dataset.own: row 0 has no column `question`"):
        held_out.check_rows(config(**given, evaluation={"sets": {"own": {"source": "x", "prompt_column": "question"}}}))


def test_data_of_another_kind_is_an_error(tmp_path):
    split = datasets.Dataset.from_list([{"prompt": "p"}])
    for given, message in (
        (
            datasets.DatasetDict(train=split, test=split),
            r'dataset: has several splits: train, test; pass one, as in data\["train"\]',
        ),
        (split.to_iterable_dataset(), "dataset: a streamed data set has no length"),
        (iter(ROWS), r"dataset: must be .* \(got list_iterator\); pass list\(rows\)"),
        (
            {"prompt": ["p"]},
            "dataset: must be a datasets.Dataset, a pandas.DataFrame, an Arrow table, a list of dicts, or the name "
            ".*got dict",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            collect(None, given, None, None)
    with pytest.raises(ConfigError, match=r"eval_dataset: 'a\.b' is no name of a set"):
        collect(None, None, {"a.b": ROWS}, None)
    for value, said in (
        (b"x", "a bytes"),
        (datetime.date(2024, 1, 1), r"a date \(pass .isoformat\(\)\)"),
        ([{"a": {1: 2}}], "a dict with the key 1, a int"),
        ({1, 2}, "a set"),
        (Decimal(1), "a Decimal"),
    ):
        with pytest.raises(ConfigError, match=f"dataset: row 0: column `x` holds no plain data: {said}; use texts"):
            collect(None, [{"prompt": "p", "x": value}], None, None).write(tmp_path)
    for answers in ([1, "x"], [10**30, 1]):
        with pytest.raises(
            ConfigError,
            match=r"dataset: column `answer` of the DataFrame cannot be converted: .*; give each column one type",
        ):
            collect(None, pandas.DataFrame({"prompt": ["a", "b"], "answer": answers}), None, None)
    with pytest.raises(ConfigError, match=r"dataset: the DataFrame has the column `x` twice; rename one"):
        collect(None, pandas.DataFrame([["a", 1, 2]], columns=["prompt", "x", "x"]), None, None)
    bad = [{"prompt": "p", "image": Path}]
    with pytest.raises(ConfigError, match="dataset: row 0: column `image` holds no plain data: a type; use texts"):
        collect(None, bad, None, None).write(tmp_path)
    assert not list((tmp_path / "from_python").iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"run.output_dir: .*/file/from_python cannot be written: Not a directory; name another folder",
    ):
        collect(None, ROWS, None, None).write(tmp_path / "file")
