"""The warnings of data and rewards that a run prints at its start. Its report shows them as alarms."""

import json

import pytest

from megagrpo.config import RewardFunction, load_config
from megagrpo.data.prompts import PromptSource, prompt_reader
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import tokenizer_of
from megagrpo.proof.report.collect import RunFiles
from megagrpo.proof.report.findings import findings
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.data_checks.gold_trial import FunctionTrial, Means
from megagrpo.trainer.data_checks.golds import GoldColumn
from megagrpo.trainer.data_checks.reward_trial import start_warnings, unreachable_judges
from megagrpo.trainer.evaluation.sets import load_sets
from megagrpo.types import Prompt
from tests.unit.commands.byte_model import save_byte_model

REWARD = """
from pathlib import Path

def leaves_a_trace(completions, **columns):
    Path(__file__).with_suffix(".called").touch()
    return [1.0 for _ in completions]

def eighth_form(completions, answer):
    return [float("<answer>" + a + "</answer>" in c and "</think>" in c) for c, a in zip(completions, answer)]

leaves_a_trace.row_fault = lambda answer: None if answer.isdigit() else f"`answer` has no digits: {answer!r}"
"""
CONFIG = """
model: {path: model}
data: {train: {source: train.jsonl}, eval: {source: heldout.jsonl}}
rollout: {max_prompt_length: 40, max_completion_length: 64, prompts_per_step: 2, num_generations: 2}
rewards: {functions: [{function: exact_number}]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("start")
    save_byte_model(made / "model")
    (made / "reward.py").write_text(REWARD)
    (made / "run.yaml").write_text(CONFIG)
    questions = ["1 + 1?", "2 + 3?", "1 + 1?", "3 + 4?", "?" * 50]
    train = [
        {"prompt": question, "answer": answer}
        for question, answer in zip(questions, ["2", "5", "2", "seven", "0"], strict=True)
    ]
    held_out = [{"prompt": "2 + 3?", "answer": "5"}, {"prompt": "?" * 60, "answer": "0"}]
    for name, rows in {"train": train, "heldout": held_out}.items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def warnings(folder, *overrides: str) -> list[str]:
    config = load_config(folder / "run.yaml", list(overrides))
    tokenizer = tokenizer_of(config, folder / "model")
    train = PromptSource(config.data.train, config.data, tokenizer, config.rollout.max_prompt_length, config.run.seed)
    with RewardScorer(config.rewards, config.rollout.max_completion_length, folder) as scorer:
        return start_warnings(
            config.rewards.functions,
            train,
            load_sets(config.each_task[0], sampling_of(config.rollout), prompt_reader(config, tokenizer)),
            scorer,
            tokenizer,
        )


def test_a_run_warns_of_rows_and_prompts_and_its_report_has_an_alarm_for_each(folder):
    said = warnings(folder)
    assert [text.partition(";")[0] for text in said[:4]] == [
        "warning: data.train: 1 of 5 prompts are longer than rollout.max_prompt_length 40 (longest: 58 tokens, first: "
        "row 4)",
        "warning: data.train: 1 of 4 prompts repeat an earlier one, first row 2 (as row 0)",
        "warning: data.eval: 1 of 2 prompts are longer than rollout.max_prompt_length 40 (longest: 68 tokens, first: "
        "row 1)",
        "warning: data.eval: 1 of 1 prompts are also in data.train, first row 0 (row 1 of data.train)",
    ]
    assert len(said) == 5 and "row 3: `exact_number`" in said[4] and "'seven'" in said[4]
    alarms = findings(RunFiles(folder, messages=[{"step": 0, "text": text} for text in said]))["alarms"]
    assert [len(alarm["texts"]) for alarm in alarms] == [1, 4] and "Other warnings" not in [
        alarm["title"] for alarm in alarms
    ]


def test_rows_for_which_no_time_is_left_are_no_warning(folder):
    prompts = [Prompt(i, (1,), f"{i}?", {"answer": f"{i}"}) for i in range(20)]
    config = load_config(folder / "run.yaml", [f"rewards.functions=[{{function: {folder}/reward.py:eighth_form}}]"])
    tokenizer = tokenizer_of(config, folder / "model")
    with RewardScorer(config.rewards, config.rollout.max_completion_length, folder) as scorer:
        golds = GoldColumn("answer")
        trial = FunctionTrial(Means(scorer, tokenizer, 64, seconds=0), "eighth_form", prompts, golds).result(
            "data.train", None
        )
        assert (trial.num_rows, trial.rows, trial.best) == (20, 1, 1)
        trials = FunctionTrial(Means(scorer, tokenizer, 64), "eighth_form", prompts, golds)
        rows, trials._ends = trials.rows, 0.0
        for row in rows:
            row.best, row.golds = "", {}
        trials._try(rows[1:9])  # the time is over before the first form
        assert trials.rows == [rows[0], *rows[9:]] and len(rows) == 20


def test_a_function_of_the_user_is_asked_about_rows_but_not_called(folder):
    said = warnings(folder, f"rewards.functions=[{{function: {folder}/reward.py:leaves_a_trace}}]")
    assert said[4:] == [
        "warning: data.train: 1 of 4 rows cannot be scored, first row 3: `leaves_a_trace`: `answer` has no digits: "
        "'seven'; correct or remove the rows"
    ]
    assert not (folder / "reward.called").exists()


def test_a_judge_that_does_not_respond_is_named_at_the_start(folder):
    functions = [
        RewardFunction(function=name, args={"url": url, "model": "m"})
        for name, url in (("pairwise", "http://127.0.0.1:9/v1"), ("rubric", "http://h:port/v1"), ("exact_number", "x"))
    ]
    (line,) = unreachable_judges(functions)
    assert line.startswith("rewards.functions[0].args.url: no judge responds at http://127.0.0.1:9/v1: ")
    assert line.endswith("start it, or correct the address")
