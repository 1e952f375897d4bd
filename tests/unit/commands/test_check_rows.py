"""`megagrpo check`: rows, prompts and functions that a run cannot learn from, counted and named with their values."""

import json
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from tests.unit.commands.byte_model import TEMPLATE, save_byte_model

REWARDS = """
def right(completions, answer, **columns):
    return [None if g is None else float(c == g and g != "bad") for c, g in zip(completions, answer)]

right.row_fault = lambda answer: "`answer` holds a unit: " + repr(answer) if answer and "km" in answer else None

def kilometres(completions, answer, **columns):
    return [None if g is None or "km" not in g else float("boxed{" + g + "}" in c) for c, g in zip(completions, answer)]

kilometres.row_fault = lambda answer: None if answer and "km" in answer else "`answer` has no unit: " + repr(answer)

def thinks(completions):
    return [float(c.startswith("<think>")) for c in completions]

def closes(completions):
    return [float("</think>" in c) for c in completions]

def longest(completions, **columns):
    return [len(c) for c in completions]

def always(completions):
    return [0.5 for c in completions]

def wants_a_word(completions, answer):
    return [float(c == g) - ("again" in c) for c, g in zip(completions, answer)]

def one_for_unreadable(completions, answer):
    return [1.0 if not g.startswith("<") else float(c == g) for c, g in zip(completions, answer)]

def zero_is_missing(completions, answer):
    return [float(c == str(g or "none")) for c, g in zip(completions, answer)]

def inside_or_boxed(completions, answer):
    return [1.0 if "boxed{" + g + "}" in c else 0.5 * (g in c) for c, g in zip(completions, answer)]

def after_thought(completions, answer):
    return [float(c.split("</think>")[1].strip() == g) for c, g in zip(completions, answer)]

def half(completions, answer):
    if any("<3>" in c for c in completions):
        raise KeyError("three")
    return [float(c == g) for c, g in zip(completions, answer)]
"""
CONFIG = """
model: {path: model}
data: {train: {source: train.jsonl}, eval: null}
rollout: {max_prompt_length: 40, max_completion_length: 64, prompts_per_step: 2, num_generations: 2}
rewards: {workers: 1, functions: [{function: rewards.py:right}]}
"""
GOLDS = ["<0>", "<1>", "", "", "<4>", "x" * 65, "bad", "12 km"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("check_rows")
    save_byte_model(made / "model")
    prompts = ["What?", "Why?", "How?", "When?", "What?", "Where?", "Whom?", "Who?"]
    rows(
        made / "train.jsonl", [{"prompt": prompt, "answer": gold} for prompt, gold in zip(prompts, GOLDS, strict=True)]
    )
    rows(made / "heldout.jsonl", [{"prompt": prompt, "answer": "<5>"} for prompt in ("Which?", "Why?")])
    rows(made / "clean.jsonl", [{"prompt": f"{i}?", "answer": f"<{i}>"} for i in range(100)])
    (made / "rewards.py").write_text(REWARDS)
    (made / "run.yaml").write_text(CONFIG)
    return made


def rows(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def check(folder: Path, *words: str) -> int:
    return main(["check", str(folder / "run.yaml"), *(word.format(folder=folder) for word in words)])


def warnings(out: str) -> list[str]:
    return [line.removeprefix("warning: ") for line in out.splitlines() if line.startswith("warning: ")]


def functions(*names: str) -> str:
    return f"rewards.functions=[{', '.join(f'{{{{function: {{folder}}/rewards.py:{name}}}}}' for name in names)}]"


def test_each_kind_of_row_and_prompt_is_one_warning_with_count_row_and_fix(folder, capsys):
    assert check(folder, "data.eval={{source: {folder}/heldout.jsonl}}", "--strict") == 1
    assert warnings(capsys.readouterr().out) == [
        "data.train: 1 of 8 prompts repeat an earlier one, first row 4 (as row 0); remove the rows",
        "data.eval: 1 of 2 prompts are also in data.train, first row 1 (row 1 of data.train); remove them from one of "
        "the two",
        "data.train: 1 of 8 rows cannot be scored, first row 7: `right`: `answer` holds a unit: '12 km'; correct or "
        "remove the rows",
        "data.train: 1 of 8 golds do not score best, row 6: `right` gives 'bad' (str, column `answer`) 0, another "
        "row's gold 0, an empty response 0; correct or remove the rows",
        "data.train: 2 of 8 rows have no gold in column `answer`, first row 2; fill the column, or remove the rows",
        "data.train: 1 of 8 golds in column `answer` are longer than the 64 tokens of rollout.max_completion_length, "
        "longest in row 5: 65; raise the limit",
    ]


def test_json_has_the_same_counts(folder, capsys):
    assert check(folder, "data.eval={{source: {folder}/heldout.jsonl}}", "--json", "--strict") == 1
    found = json.loads(capsys.readouterr().out)
    train, held_out = found["sources"]
    assert (train["num_repeated"], train["num_trained_on"], held_out["num_repeated"], held_out["num_trained_on"]) == (
        1,
        0,
        0,
        1,
    )
    (right, _), names = (
        found["rewards"],
        ("rows", "best", "unscored", "without_gold", "too_long", "longest", "failed", "row_faults"),
    )
    assert [right[name] for name in names] == [8, 5, 0, 2, 1, [5, 65], 0, [[7, "`answer` holds a unit: '12 km'"]]]
    assert [row["row"] for row in right["trials"] if not row["best"]] == [2, 3, 6] and len(found["warnings"]) == 6


def test_a_row_that_another_function_scores_is_no_warning(folder, capsys):
    rows(
        folder / "mixed.jsonl",
        [{"prompt": f"{i}?", "answer": gold} for i, gold in enumerate(["<0>", "3 km", "<1>", "4 km"])],
    )
    assert check(folder, "data.train.source={folder}/mixed.jsonl", functions("right", "kilometres"), "--strict") == 0
    out = capsys.readouterr().out
    assert [line.split()[:4] for line in out.splitlines() if "/4 " in line] == [
        ["right", "1", "4/4", "0"],
        ["kilometres", "1", "2/4", "2"],
    ]
    assert "  kilometres  reads `answer` from \\boxed{GOLD}\n" in out
    assert check(folder, "data.train.source={folder}/mixed.jsonl", functions("right", "wants_a_word"), "--strict") == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "always",
            "`always` gives every response 0.5: golds in all forms, golds of other rows, empty and long ones; correct "
            "the function",
        ),
        (
            "longest",
            "no reward gives a gold of data.train more than an empty response and another row's gold, row 0: "
            "`longest` gives",
        ),
        ("thinks", ""),  # a format is no answer
        ("wants_a_word", ""),
    ],
)
def test_a_function_that_tells_nothing_is_a_warning(folder, name, said, capsys):
    assert check(folder, "data.train.source={folder}/clean.jsonl", functions(name), "--rows", "4") == 0
    found = warnings(capsys.readouterr().out)
    assert len(found) == bool(said) and all(said in warning for warning in found), found


@pytest.mark.parametrize(
    ("name", "golds", "said"),
    [
        (
            "one_for_unreadable",
            ["<0>", "?", "<2>"],
            ["1 of 3 golds do not score best, row 1: `one_for_unreadable` gives '?' (str, column"],
        ),
        (
            "zero_is_missing",
            [1, 0, [0], 2],
            ["2 of 4 golds do not score best, row 1: `zero_is_missing` gives '0' (int, column `answer`) 0"],
        ),
        ("inside_or_boxed", ["<0>", "<1>", "<2>"], []),
    ],
)
def test_a_function_that_misjudges_some_golds_is_a_warning(folder, name, golds, said, capsys):
    rows(folder / "some.jsonl", [{"prompt": f"{i}?", "answer": gold} for i, gold in enumerate(golds)])
    assert check(folder, "data.train.source={folder}/some.jsonl", functions(name)) == 0
    out = capsys.readouterr().out
    assert [text in line for text, line in zip(said, warnings(out), strict=True)] == [True] * len(said), out
    assert ("reads `answer` from \\boxed{GOLD}" in out) == (name == "inside_or_boxed")  # the form that scores most


def test_rows_are_spread_over_the_data_set_and_a_failing_one_is_named(folder, capsys):
    assert check(folder, "data.train.source={folder}/clean.jsonl", "--json", "--rows", "5") == 0
    assert [row["row"] for row in json.loads(capsys.readouterr().out)["rewards"][0]["trials"]] == [0, 20, 40, 60, 80]
    assert check(folder, "data.train.source={folder}/clean.jsonl", functions("half")) == 2
    said = "`half` fails for a gold of column `answer`, row 0: KeyError: 'three'; correct the function"
    assert said in capsys.readouterr().err
    assert check(folder, "data.train.source={folder}/clean.jsonl", functions("after_thought")) == 2
    assert (
        "`after_thought` fails for an empty response, row 0: IndexError: list index out of range"
        in capsys.readouterr().err
    )
    assert check(folder, "--rows", "0") == 2 and "--rows 0: must be 1 or more" in capsys.readouterr().err


def test_a_thought_that_the_template_opens_is_shown_and_continued(folder, capsys):
    (folder / "opens.jinja").write_text(TEMPLATE + "assistant\n<think>\n")
    words = [
        "data.train.source={folder}/clean.jsonl",
        "data.chat_template={folder}/opens.jinja",
        "rollout.max_prompt_length=64",
    ]
    assert check(folder, *words, functions("closes", "thinks"), "--rows", "3") == 0
    out = capsys.readouterr().out
    assert "  opened    `<think>`: a response continues the thought that the prompt has opened\n" in out
    assert [line.split()[2:-1] for line in out.splitlines() if line.startswith("  closes") and "/" in line] == [
        ["0/3", "0", "1", "1", "0"]
    ]
    limit = ", of at most 9 tokens (rollout.max_thinking_tokens)\n"
    assert check(folder, *words, "rollout.max_thinking_tokens=9", "--rows", "1") == 0
    assert f"a response continues the thought that the prompt has opened{limit}" in capsys.readouterr().out
    (folder / "opens.jinja").write_text(TEMPLATE + "assistant\n{% if deep %}<think>{% endif %}")
    assert check(folder, *words, "rollout.max_thinking_tokens=9", "--rows", "1") == 0
    assert f"  opened    no thought: a response may begin with one{limit}" in capsys.readouterr().out
    (said,) = warnings(out)
    assert said.startswith(
        "rewards.functions: `thinks` gives every response 0: golds in all forms, after `<think>` at the end of the "
        "prompt"
    )
