"""`megagrpo check`: what it prints of data, prompts and rewards, and the problems that it names."""

import json
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from tests.unit.commands.byte_model import TEMPLATE, save_byte_model
from tests.unit.for_each import for_each

REWARDS = """
import time

def right(completions, answer, **columns):
    return [float(c == a) if c else None for c, a in zip(completions, answer)]

def brief(completions):
    return [0.5 * (len(c) < 100) for c in completions]

def always(completions):
    return [0.5 for _ in completions]

def fails_on_nothing(completions, answer):
    return [1.0 / len(c) for c in completions]

def one_for_all(completions):
    return [1.0]

def slow(completions):
    time.sleep(60)

def compares_text(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def boxed(completions, answer, **columns):
    return [float("boxed{" + str(a) + "}" in c) for c, a in zip(completions, answer)]

def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: one number
        b: another number
    \"\"\"
    return a + b
"""
CONFIG = """
model: {path: model}
data: {train: {source: train.jsonl}, eval: {source: heldout.jsonl}}
rollout: {max_prompt_length: 40, prompts_per_step: 2, num_generations: 2}
rewards: {workers: 1, functions: [{function: rewards.py:right}, {function: rewards.py:brief, weight: 0.5}]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run whose model is a config and a tokenizer of bytes, with an empty file of weights."""
    made = tmp_path_factory.mktemp("check")
    save_byte_model(made / "model")
    questions = ["a?", "four", "?" * 20, "?" * 60]
    rows = [json.dumps({"prompt": question, "answer": f"<{i}>", "level": i}) for i, question in enumerate(questions)]
    (made / "train.jsonl").write_text("\n".join(rows) + "\n")
    (made / "heldout.jsonl").write_text('{"prompt": "held out", "answer": "yes"}\n')
    (made / "rewards.py").write_text(REWARDS)
    (made / "run.yaml").write_text(CONFIG)
    return made


def check(folder: Path, *words: str) -> int:
    return main(["check", str(folder / "run.yaml"), *words])


def test_it_shows_data_lengths_a_prompt_and_what_rewards_give(folder, capsys):
    assert check(folder) == 0
    out = capsys.readouterr().out
    assert f"data.train: {folder}/train.jsonl\n  rows      4, an epoch is 1.5 steps\n" in out
    assert "  columns   prompt (prompt), for rewards: answer, level\n" in out
    assert "  tokens    min 10, median 20, max 68; limit 40 (rollout.max_prompt_length)\n" in out
    assert "  dropped   1 of 4: longer than the limit, first row 3 (data.overlong_prompts)\n" in out
    assert f"data.eval: {folder}/heldout.jsonl\n  rows      1\n" in out and "    | held out<|end|><|start|>" in out
    assert "    | <|start|>user\n" in out
    assert (
        "rewards of data.train, mean values on 3 rows\n" in out
        and "rewards of data.eval, mean values on 1 rows\n" in out
    )
    table = [
        line.split()[:-1] for line in out.splitlines() if line.startswith(("  right ", "  brief ")) and "/" in line
    ]
    assert table[:2] == [
        ["right", "1", "3/3", "0", "1", "0", "none"],
        ["brief", "0.5", "0/3", "0", "0.5", "0.5", "0.5"],
    ]
    assert table[2:] == [
        ["right", "1", "1/1", "0", "1", "0", "none"],
        ["brief", "0.5", "0/1", "0", "0.5", "0.5", "0.5"],
    ]
    assert (
        out.count("warning: ") == 1
        and "warning: data.train: 1 of 4 prompts are longer than rollout.max_prompt_length 40" in out
    )
    assert check(folder, "rollout.max_prompt_length=80") == 0
    assert "no problem found; the plan is valid on 1 rank(s)" in capsys.readouterr().out


def test_as_json_it_holds_every_length_and_row(folder, capsys):
    assert check(folder, "data.overlong_prompts=truncate_left", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    train, held_out = found["sources"]
    assert (train["lengths"], train["num_usable"], held_out["key"]) == ([10, 12, 28, 68], 4, "data.eval")
    right, brief = found["rewards"][:2]
    assert [right[name] for name in ("data", "function", "column", "kind", "form", "rows", "best")] == [
        *("data.train", "right", "answer", "str", "GOLD", 4, 4)
    ]
    assert right["trials"][3] == {"row": 3, "gold": "<3>", "value": 1.0, "other": 0.0, "empty": None, "best": True}
    assert (brief["best"], brief["gold"], brief["other"], brief["empty"], brief["constant"]) == (
        0,
        0.5,
        0.5,
        0.5,
        False,
    )
    assert found["problems"] == [] and all(trial["milliseconds"] >= 0 for trial in found["rewards"])


@for_each(
    ("words", "messages"),
    [
        (
            ["rewards.functions.1.function={folder}/rewards.py:fails_on_nothing"],
            [
                "`fails_on_nothing` fails for an empty response, row 0: ZeroDivisionError: float division by zero; "
                "correct the function"
            ],
        ),
        (
            ["rewards.functions.1.function={folder}/rewards.py:one_for_all"],
            [
                "`one_for_all` fails for an empty response, row 0: it returned 1 rewards for 2 completions; return a "
                "list"
            ],
        ),
        (
            ["rewards.functions.1={{function: {folder}/rewards.py:slow, timeout: 0.3}}"],
            ["`slow` fails for an empty response, row 0: no result in time"],
        ),
        (["rewards.functions.0.function={folder}/rewards.py:rigth"], ["rewards.functions[0]", "rigth"]),
        (
            ["data.train.source={folder}/gone.jsonl"],
            ["1 problem(s)\n  data.train.source: no file or folder", "gone.jsonl; correct the path"],
        ),
        (
            ["data.columns={{answer: anser}}"],
            ["data.columns.answer: data.train has no column `anser`; it has prompt, answer, level"],
        ),
        (
            ["data.overlong_prompts=error"],
            ["1 of 4 prompts are longer than rollout.max_prompt_length 40 (longest: 68 tokens, first: row 3)"],
        ),
        (["rollout.max_prompt_length=5"], ["all prompts are dropped"]),
        (["data.chat_template={{{{ messages[0].nothing.at_all }}}}"], ["data.chat_template", "cannot render"]),
        (["parallel.tp=3"], ["num_attention_heads=4 is not divisible by tp=3"]),
        (["model.path={folder}/gone"], ["model.path", "gone does not exist"]),
    ],
)
def test_problems_are_named_and_the_exit_code_is_2(folder, words, messages, capsys):
    assert check(folder, *(word.format(folder=folder) for word in words)) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said


def test_an_answer_that_no_reward_prefers_to_nothing_is_a_warning(folder, capsys):
    (folder / "ints.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}\n{"prompt": "2 + 0?", "answer": 2}\n')
    words = [f"data.train.source={folder}/ints.jsonl", "data.eval=null", "rewards.functions.1.weight=0"]
    assert check(folder, *words, f"rewards.functions.0.function={folder}/rewards.py:compares_text") == 0
    out = capsys.readouterr().out
    said = (
        "warning: rewards.functions: no reward gives a gold of data.train more than an empty response and another "
        "row's gold, row 0: `compares_text` gives '2' (int, column `answer`) 0, another row's gold 0, an empty "
        "response 0; compare values of one type"
    )
    assert said in out and "no problem found" not in out
    assert check(folder, *words, f"rewards.functions.0.function={folder}/rewards.py:boxed") == 0
    assert "no problem found" in capsys.readouterr().out


def test_the_answer_in_rows_of_verl_is_named(folder, capsys):
    row = {"prompt": "1 + 1?", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
    (folder / "verl.jsonl").write_text(json.dumps(row) + "\n")
    words = [f"data.train.source={folder}/verl.jsonl", "data.eval=null", "rewards.functions=[{function: exact_number}]"]
    assert check(folder, *words) == 2
    said = "data.columns={answer: reward_model.ground_truth} passes the field `reward_model.ground_truth` as `answer`"
    assert said in capsys.readouterr().err
    assert check(folder, *words, "data.columns={answer: reward_model.ground_truth}") == 0
    assert "no problem found" in capsys.readouterr().out


def test_the_gold_of_a_reward_function_of_verl_is_the_ground_truth(folder, capsys):
    rows = [
        {"prompt": f"{i} + 1?", "data_source": "sums", "reward_model": {"ground_truth": f"{i + 1}"}} for i in (1, 2)
    ]
    (folder / "verl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "verl_reward.py").write_text(
        "def score(completions, data_source, reward_model, **columns):\n"
        "    pairs = zip(completions, reward_model)\n"
        "    return [float(text == model['ground_truth']) for text, model in pairs]\n"
    )
    functions = f"rewards.functions=[{{function: '{folder}/verl_reward.py:score'}}]"
    assert check(folder, f"data.train.source={folder}/verl.jsonl", "data.eval=null", functions, "--strict") == 0
    assert "reads `reward_model.ground_truth`" in capsys.readouterr().out


def test_a_reward_model_is_not_loaded_without_being_asked_for(folder, capsys):
    assert check(folder, f"rewards.functions.1={{function: 'model:{folder}/model', name: judge}}") == 0
    out = capsys.readouterr().out
    assert "not called, because it loads a reward model; add --models" in out and "  right" in out


def test_the_tools_of_a_conversation_are_shown_and_rendered(folder, capsys):
    (folder / "tools.jinja").write_text("{% for t in tools %}{{ t.function.name }} {% endfor %}" + TEMPLATE)
    words = [
        f"multi_turn.tools=[{folder}/rewards.py:add]",
        f"data.chat_template={folder}/tools.jinja",
        "rollout.max_prompt_length=64",
    ]
    assert check(folder, *words) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "tools: add" in out and "    | add <|start|>user" in out


def test_prompts_that_are_rendered_already_are_a_warning(folder, capsys):
    (folder / "rendered.jsonl").write_text('{"prompt": "<|start|>user\\na?<|end|><|start|>", "answer": "<0>"}\n')
    for key in ("data.train", "data.eval"):
        assert check(folder, f"{key}.source={folder}/rendered.jsonl") == 0
        out = capsys.readouterr().out
        assert (
            f"warning: {key}: 1 of 1 prompts already hold `<|start|>` (first: row 0), and the chat template renders "
            f"them again" in out
        )
        assert "no problem found" not in out


SOURCE = """
class Source:
    def __init__(self, rows, seed):
        self.longest = max(rows, key=lambda row: len(rows[row]["prompt"]))

    def next(self, count, progress):
        return [self.longest] * count

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Broken(Source):
    def __init__(self, rows, seed):
        self.levels = [rows[row]["lvl"] for row in rows]
"""


def test_a_data_source_is_made_with_the_usable_rows(folder, capsys):
    (folder / "choose.py").write_text(SOURCE)
    assert check(folder, f"data.source={folder}/choose.py:Source") == 0
    capsys.readouterr()
    assert check(folder, f"data.source={folder}/choose.py:Broken") == 2
    said = f"data.source: `{folder}/choose.py:Broken` cannot be constructed: KeyError: 'lvl' ({folder}/choose.py:18)"
    assert said in capsys.readouterr().err
    assert check(folder, f"data.source={folder}/choose.py:Missing") == 2
    assert f"{folder}/choose.py has no function or class `Missing`; it has: Source, Broken" in capsys.readouterr().err


VERL = {"prompt": [{"role": "user", "content": "Say 4."}], "reward_model": {"ground_truth": "4"}}
ROWS_OF_HUB = {  # a row in the form of each hub data set of the recipes, by recipe and task
    "verl_gsm8k_math": {
        "gsm8k": {"question": "Say 4.", "answer": "Two and two.\n#### 4"},
        "math": {"problem": "Say 4.", "solution": r"It is \boxed{4}."},
    },
    "skywork_or1": {
        "math": VERL,
        "code": VERL | {"reward_model": {"ground_truth": json.dumps({"inputs": ["1"], "outputs": ["1"]})}},
    },
    "prorl": {
        "math": {"problem": "Say 4.", "answer": "4"},
        "code": VERL | {"reward_model": {"ground_truth": json.dumps({"inputs": ["1"], "outputs": ["1"]})}},
        "science": {"problem": "Say 4.", "matched_solution": "4"},
    },
}


@for_each("recipe", list(ROWS_OF_HUB))
def test_published_recipes_of_several_tasks_read_rows_of_their_data(recipe, folder, tmp_path, capsys):
    words = [f"model.path={folder}/model", "rewards.workers=1", "rollout.max_completion_length=512"]
    words.append("rollout.max_prompt_length=512")
    for task, row in ROWS_OF_HUB[recipe].items():
        (tmp_path / f"{task}.jsonl").write_text(2 * f"{json.dumps(row)}\n")
        words += [f"tasks.{task}.data.{part}={{source: {tmp_path}/{task}.jsonl}}" for part in ("train", "eval")]
    if recipe == "prorl":
        words.append("tasks.logic.data.train.size=3")
    assert main(["check", f"configs/examples/tasks/{recipe}.yaml", *words]) == 0
    said = capsys.readouterr().out
    assert all(f"tasks.{task}." in said for task in ROWS_OF_HUB[recipe]), said
