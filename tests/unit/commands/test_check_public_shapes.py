"""`megagrpo check` on rows in the columns of public data sets, with the config that a user writes for them."""

import json
from pathlib import Path

import pytest
import yaml

from megagrpo.__main__ import main
from tests.unit.commands.byte_model import save_byte_model

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer. Problem: {}?"
)
MATHEMATICS = {
    "math_500": [
        dict(problem=f"Problem {i}", solution=f"So we get $\\boxed{{{answer}}}$.", answer=answer)
        | dict(subject="Algebra", level=2)
        for i, answer in enumerate(
            [
                r"\left( 3, \frac{\pi}{2} \right)",
                "p - q",
                r"\frac{14}{3}",
                r"\text{Evelyn}",
                "[-2,7]",
                r"2\sqrt{5}",
                "3, 5, 7",
                "42_9",
            ]
        )
    ],
    "gsm8k": [
        {
            "question": "Half of 48 more clips?",
            "answer": "Half is 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72",
        },
        {"question": "How many eggs?", "answer": "5 times 425 is <<5*425=2125>>2,125.\n#### 2,125"},
        {"question": "How much is left?", "answer": "10-15 = <<10-15=-5>>-5 dollars.\n#### -5"},
        {"question": "What is the share?", "answer": "1/4 = <<1/4=0.25>>0.25.\n#### 0.25"},
    ],
    "dapo": [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": DAPO.format(i), "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{i}"},
        }
        for i, answer in enumerate(["34", "113", "-1", "2021"])
    ],
    "deepscaler": [
        {
            "problem": "A distance?",
            "answer": r"-\frac{2}{3}",
            "solution": "1. We have two.\n2. So\n\\boxed{-\\frac{2}{3}}",
        },
        {"problem": "A count?", "answer": "26", "solution": ""},
        {"problem": "A sum?", "answer": "$128$", "solution": ""},
        {"problem": "A set?", "answer": r"(-\infty, 5]", "solution": "By 1. it is that."},
    ],
}
PROGRAMS = {
    "humaneval": [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f"from typing import List\n\n\ndef {name}(xs: List[int]) -> int:\n    'Return a number of xs.'\n",
            "canonical_solution": f"    return {body}\n",
            "test": f"\n\nMETADATA = {{\n    'author': 'x'\n}}\n\n\ndef check(candidate):\n    assert candidate([1, "
            f"2]) == {right}\n",
            "entry_point": name,
        }
        for i, (name, body, right) in enumerate([("total", "sum(xs)", 3), ("most", "max(xs)", 2)])
    ],
    "mbpp": [
        {
            "task_id": 602 + i,
            "text": f"Write a function to {name}.",
            "code": f"def {name}(a, b):\r\n  return {body}",
            "test_list": [f"assert {name}(3, 2) == {right}", f"assert {name}(0, 0) == 0"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for i, (name, body, right) in enumerate([("add", "a + b", 5), ("take", "a - b", 1)])
    ],
    "apps": [
        {
            "problem_id": 0,
            "question": "Print the sum of two numbers.",
            "solutions": json.dumps(
                ["a, b = map(int, input().split())\nprint(a + b)\n", "print(eval(input().replace(' ', '+')))\n"]
            ),
            "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
            "starter_code": "",
        },
        {
            "problem_id": 1,
            "question": "Add two numbers.",
            "solutions": json.dumps(["def add(a, b):\n    return a + b\n"]),
            "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}),
            "starter_code": "def add(a, b):\n",
        },
    ],
    "kodcode": [
        {
            "question": f"Write {name}.",
            "solution": f"def {name}(a):\n    return {body}",
            "test": f"from solution import {name}\n\ndef test_two():\n    assert {name}(2) == {right} and {name}(0) "
            f"== 0\n",
        }
        for name, body, right in [("double", "2 * a", 4), ("cube", "a ** 3", 8)]
    ],
    "livecodebench": [
        {
            "question_content": f"Print the {what} of two numbers.",
            "platform": "atcoder",
            "starter_code": "",
            "public_test_cases": json.dumps([{"input": "6 2\n", "output": f"{right}\n", "testtype": "stdin"}]),
            "metadata": "{}",
        }
        for what, right in [("sum", 8), ("product", 12)]
    ],
}
CONFIGS = {
    "gsm8k": "prompt_column: question, columns: {solution: answer}, extract_hash_answer: [solution]",
    "math_500": "prompt_column: problem, columns: {solution: answer}",
    "dapo": "prompt_column: prompt, columns: {answer: reward_model.ground_truth}",
    "deepscaler": "prompt_column: problem, columns: {solution: answer}",
    "humaneval": "prompt_column: prompt, columns: {tests: test}",
    "mbpp": "prompt_column: text, columns: {tests: test_list}",
    "apps": "prompt_column: question, columns: {tests: input_output}",
    "kodcode": "prompt_column: question, columns: {tests: test}",
    "livecodebench": "prompt_column: question_content, columns: {tests: public_test_cases}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("shapes")
    save_byte_model(made / "model")
    for name, rows in (MATHEMATICS | PROGRAMS).items():
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def table(folder: Path, names: list[str], functions: str, capsys) -> dict[tuple[str, str], list[str]]:
    """Check a config that trains on the first data set and evaluates on the others. Returns the cells by data set and
    function."""
    sets = "".join(f"    {name}: {{source: {name}.jsonl, {CONFIGS[name]}}}\n" for name in names[1:])
    keys = yaml.safe_load(f"{{{CONFIGS[names[0]]}}}")
    train = f"data: {json.dumps({'train': {'source': f'{names[0]}.jsonl'}, 'eval': None} | keys)}\n"
    limits = "rollout: {max_prompt_length: 400, max_completion_length: 400, prompts_per_step: 2, num_generations: 2}\n"
    (folder / "run.yaml").write_text(
        f"model: {{path: model}}\n{train}evaluation:\n  sets:\n{sets}{limits}rewards: {{workers: 1, functions: {functions}}}\n"
    )
    assert main(["check", str(folder / "run.yaml"), "--strict"]) == 0, capsys.readouterr()
    cells, key = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("rewards of "):
            key = line.split(",")[0].rpartition(".")[2]
        elif (
            key
            and line.startswith("  ")
            and line.split()[0] in functions
            and "reads" not in line
            and "no column" not in line
        ):
            cells[names[0] if key == "train" else key, line.split()[0]] = line.split()[2:-1]
    return cells


@pytest.mark.full
def test_every_gold_of_mathematics_scores_best(folder, capsys):
    found = table(folder, list(MATHEMATICS), "[{function: accuracy}, {function: think_format, weight: 0.1}]", capsys)
    for name, rows in MATHEMATICS.items():
        assert found[name, "accuracy"] == [f"{len(rows)}/{len(rows)}", "0", "1", "0", "0"], name
        assert found[name, "think_format"] == [f"0/{len(rows)}", "0", "1", "1", "0"], name


@pytest.mark.full
def test_every_gold_program_passes_its_tests(folder, capsys):
    found = table(folder, list(PROGRAMS), "[{function: code_execution, args: {packages: false}}]", capsys)
    for name in PROGRAMS:
        # it has no solutions
        expected = ["2/2", "0", "1", "0", "0"] if name != "livecodebench" else ["-", "0", "none", "none", "0"]
        assert found[name, "code_execution"] == expected, name
