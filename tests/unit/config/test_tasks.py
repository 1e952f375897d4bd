"""Tasks of a run: what each of them has, files of tasks, and problems that name the task."""

import json
import re

import pytest

from megagrpo.config import ConfigError, load_config, save_resolved

RUN = """
model: {path: m}
data: {prompt_column: question, chat_template_kwargs: {a: 1}}
rewards: {functions: [{function: accuracy}], timeout: 3}
tasks:
  - {name: math, weight: 3, data: {train: {source: math.jsonl}}}
  - tasks/code.yaml
"""
CODE = """
data: {train: {source: rows.jsonl}, eval: {source: held_out.jsonl}, prompt_column: text}
rewards: {functions: [{function: code_execution}, {function: mine.py:form, weight: 0.5}]}
sampling: {temperature: 0.5}
"""
GAME = "tasks.code.multi_turn.environment=mine.py:Game"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "tasks" / "code.yaml").write_text(CODE)
    return tmp_path / "run.yaml"


def test_a_task_has_its_own_values_and_the_runs_for_the_others(run):
    config = load_config(run, ["tasks.code.weight=2"])
    math, code = config.each_task
    assert (math.name, math.weight, math.config.data.prompt_column) == ("math", 3, "question")
    assert (code.name, code.weight, code.config.data.prompt_column) == ("code", 2, "text")
    assert code.config.data.train.source == str(run.parent / "tasks" / "rows.jsonl")
    assert code.config.rewards.timeout == 3 and code.sampling == {"temperature": 0.5}
    assert config.all_rewards.names == ["math/accuracy", "code/code_execution", "code/form"]
    assert [function.weight for function in config.all_rewards.functions] == [1, 1, 0.5]
    assert config.task_rewards["code"] == ["code/code_execution", "code/form"]
    assert math.config.data.chat_template_kwargs == {"a": 1} and config.has_own_sampling


def test_a_saved_config_has_the_tasks_of_its_files(run, tmp_path):
    config = load_config(run)
    saved = load_config(save_resolved(config, tmp_path / "saved"))
    assert (saved.tasks, saved.all_rewards) == (config.tasks, config.all_rewards)


def test_the_tasks_of_a_copy_have_its_values(run):
    config = load_config(run)
    seeds = [task.config.run.seed for task in config.each_task]
    copied = config.model_copy(update={"run": config.run.model_copy(update={"seed": 7})})
    assert {task.config.run.seed for task in copied.each_task} == {7} != {*seeds} and copied != config


def test_a_task_of_text_beside_a_task_with_images_has_no_tower_and_may_have_an_agent(run):
    more = ["data.images=true", "model.freeze_vision_tower=false", "tasks.code.data.images=false"]
    config = load_config(run, [*more, "tasks.code.multi_turn.agent.function=a.py:f"])
    assert [task.config.data.images for task in config.each_task] == [True, False] and config.towers == "trained"


def test_only_tasks_that_have_what_advantages_compare_compare_it(run):
    tokens = "tasks.code.rewards.functions=[{function: mine.py:form, per: token}]"
    for by, part in dict(token=tokens, process=tokens, turn=GAME, state=GAME).items():
        weight = "turn_advantage_weight" if part == GAME else "token_advantage_weight"
        config = load_config(run, [f"algorithm.advantage_by={by}", f"algorithm.{weight}=0.5", part])
        math, code = (task.config.algorithm for task in config.each_task)
        assert (math.advantage_by, getattr(math, weight)) == ("trajectory", 1), by
        assert (code.advantage_by, getattr(code, weight)) == (by, 0.5)


def test_a_run_without_tasks_is_one_task(run):
    (task,) = load_config(run, ["tasks=[]", "data.train.source=a.jsonl"]).each_task
    assert (task.name, task.key("data.train"), task.named("accuracy")) == ("", "data.train", "accuracy")


def problems(run, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(run, overrides)
    return [str(problem) for problem in caught.value.problems] or [str(caught.value)]


def test_problems_of_all_tasks_are_named_with_the_task(run):
    found = problems(run, "tasks.code.data.promt_column=x", "tasks.math.rewards.functions=[]")
    assert found == [
        "tasks.math.rewards.functions: the run has no rewards; name a function, or a scheduler, environment or agent "
        "that gives rewards",
        "tasks.code.data.promt_column: unknown key; did you mean data.prompt_column?",
    ]


def test_everything_wrong_with_tasks_is_said_at_once(run):
    found = problems(
        run,
        *["tasks.math.weight={by: pass_rate, least: 0, most: 0}", "tasks.math.data.prompt_colum=x"],
        *["tasks.code.wieght=1", "tasks.code.rewards.functions=[]", "tasks.code.rollout.num_generations=1"],
        *["algorithm.beta=-1", "model.fusions=[rope]", "train.share_prompts=true"],
    )
    assert {problem.partition(" (got")[0].partition(";")[0] for problem in found} == {
        "algorithm.beta: must be at least 0",
        "train.share_prompts: true lets positions continue a prompt's, but the fused rotation of model.fusions begins at 0",
        "tasks.math.weight.most: must be greater than 0",
        "tasks.math.weight.least: must be greater than 0",
        "tasks.math.data.prompt_colum: unknown key",
        "tasks.code.wieght: unknown key",
        "tasks.code.rewards.functions: the run has no rewards",
        "tasks.code.rollout.num_generations: must be at least 2",
    }
    assert problems(run, "tasks=5") == ["tasks: must be a list (got 5)"]


def test_problems_of_files_and_of_tasks_without_a_valid_name_are_said_with_the_others(run):
    (run.parent / "ring.yaml").write_text("defaults: ring.yaml")
    broken = {"name": "a\n" + "b" * 10**6, "data": {"promt_column": "x"}}
    unnamed = {"data": {"train": {"source": "a.jsonl"}}, "rewards": {"functions": []}}
    named = {"name": "math", "weight": 0}
    values = [str(run.parent), str(run.parent / "ring.yaml"), "none.yaml", broken, unnamed, unnamed, named, named]
    with pytest.raises(ConfigError) as caught:
        load_config(run, [f"tasks={json.dumps(values)}"])
    text = str(caught.value)
    assert len(text) < 3000 and not any("b" * 300 in line for line in text.splitlines())
    for problem in (
        "cannot read it: it is no regular file",
        "`defaults:` forms a cycle: ring.yaml -> ring.yaml",
        "none.yaml: cannot read it",
        "tasks.0.name: must match the pattern",
        "tasks.0.data.promt_column: unknown key",
        "tasks.1.name: required, but missing",
        "tasks.1.rewards.functions: the run has no rewards",
        "tasks.math.weight: must be greater than 0",
        "tasks.math.name: 2 tasks have this name",
    ):
        assert text.count(problem) == 1, (problem, text)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("tasks.code.name=math", "tasks.math.name: 2 tasks have this name; give each its own"),
        ("tasks.math.weight=0", "tasks.math.weight: must be greater than 0 (got 0)"),
        (
            "tasks.math.epochs=1 tasks.code.epochs=2",
            "tasks: all tasks have `epochs`, so none would be left; leave it out of one of them",
        ),
        (
            "tasks.math.data.images=true",
            "tasks.math.data.images: images load the model's vision tower; set data.images",
        ),
        (
            "data.images=true tasks.math.multi_turn.agent.function=a.py:f",
            "tasks.math.multi_turn.agent: with data.images, agents send text only; use tools or an environment",
        ),
        ("tasks.math.rewards.workers=1", "tasks.math.rewards.workers: is one value for all tasks; set it for the run"),
        ("tasks.math.weight={2: 1}", "tasks.math.weight: the first weight is that of step 1; begin with `1: ...`"),
        ("tasks.math.weight={1: -1}", "tasks.math.weight: must be at least 0 in each step (got 1: -1)"),
        (
            "tasks.math.epochs=1 tasks.code.weight={1: 1, 5: 0}",
            "tasks: from step 5 on only tasks with `epochs` have a weight above 0; give one to another task",
        ),
        (
            "tasks.math.weight={by: pass_rate, least: 2}",
            "tasks.math.weight: `least` must be at most `most` (got 2 and 1)",
        ),
        ("tasks.math.weight={by: reward}", "tasks.math.weight.by: must be 'pass_rate' (got 'reward')"),
        ("tasks.math.weight={least: 0.1}", "tasks.math.weight.by: required, but missing; set it"),
        (
            "tasks.math.weight={by: pass_rate} tasks.code.weight={1: 1, 5: 2}",
            "tasks.code.weight: weights by step do not mix with weights by pass rate of other tasks; give it one weight",
        ),
        ("tasks.math.train.learning_rate=1", "tasks.math.train: unknown key"),
        (
            "tasks.math.rollout.num_generations=1",
            "tasks.math.rollout.num_generations: must be at least 2 (got 1)",
        ),
        (
            "tasks.math.rollout.max_prompt_length=600",
            "tasks.math.rollout.max_prompt_length: 600 is more than rollout.max_prompt_length 512",
        ),
        (
            "algorithm.advantage_by=turn",
            "algorithm.advantage_by: turn: no task has turns or rewards that it compares; set it to trajectory",
        ),
        (
            "rollout.max_staleness=1 data.curriculum=[0.1,0.9]",
            "rollout.max_staleness: with tasks: a prompt that was requested ahead cannot rest",
        ),
        ("evaluation.keep_best=math/reward", "evaluation.keep_best: math/reward: there is no data.eval, and no set of"),
        ("tasks=[]", "data.train: required, but missing; set it"),
        ("tasks=[none.yaml]", "none.yaml: cannot read it: No such file or directory"),
        ("tasks.math.loss_weight=1e308", "tasks.math.loss_weight: must be at most 1000000 (got 1e+308)"),
        ("tasks.math.loss_weight=5e-324", "tasks.math.loss_weight: must be at least 1e-06 (got 5e-324)"),
        ("tasks.math.weight={by: pass_rate, most: 1e308}", "tasks.math.weight.most: must be at most 1000000"),
        ("tasks.math.name=..", "tasks.0.name: must match the pattern"),
        ("tasks.math.name=a/b", "tasks.0.name: must match the pattern"),
        ("tasks.other.weight=1", "tasks.other.weight: the list has elements 0 to 1, named math, code (got 'other')"),
    ],
)
def test_what_a_task_cannot_have_is_refused(run, override, problem):
    assert any(problem in found for found in problems(run, *re.split(" (?=[a-z]+[.])", override)))
