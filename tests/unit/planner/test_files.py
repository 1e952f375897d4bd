"""A plan's checks of data, rewards and machine: missing files, and the assumed GPUs."""

import json
from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.planner import plan, with_times
from megagrpo.planner.costs.gpu_specs import GPUS
from megagrpo.planner.costs.workload import expected_lengths
from megagrpo.planner.times.layout_search import search
from megagrpo.rewards.registry.reward_registry import resolve, unknown_arguments
from megagrpo.rewards.registry.target import BUILT_IN_REWARDS
from megagrpo.rewards.workers.worker import _signature as describe
from megagrpo.rewards.workers.worker import find
from megagrpo.suggestions import did_you_mean

REPOSITORY = Path(__file__).parents[3]


def told_of(*overrides: str) -> list[str]:
    """The problems of the quickstart with these overrides, each with its key."""
    return [
        str(problem) for problem in plan(load_config(REPOSITORY / "configs" / "quickstart.yaml", overrides), 1).problems
    ]


def test_data_that_does_not_exist_or_lacks_a_column_is_a_problem(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?"}\n' + '{"question": "1 + 1?", "answer": "2"}\n' * 8)
    table = tmp_path / "rows.csv"
    table.write_text("question,answer\n1 + 1?,2\n")
    mine = f"data.train.source={rows}"
    assert told_of(mine, "data.prompt_column=question", "data.columns={x: answer}", "data.eval=null") == []
    (gone,) = told_of(f"data.train.source={tmp_path}/gone.jsonl")
    assert gone == f"data.train.source: no file or folder {tmp_path}/gone.jsonl; correct the path"
    (column,) = told_of(mine, "data.prompt_column=questoin", "data.eval=null")
    assert (
        column
        == f"data.prompt_column: no column `questoin`; did you mean `question`?; {rows} has columns question, answer"
    )
    (renamed,) = told_of(
        f"data.train.source={table}", "data.prompt_column=question", "data.columns={x: key}", "data.eval=null"
    )
    assert renamed.startswith("data.columns.x: no column `key`;")
    (own,) = told_of(f"evaluation.sets.more={{source: {rows}, prompt_column: task}}")
    assert own.startswith("evaluation.sets.more.prompt_column: no column `task`;")
    (template,) = told_of(f"data.chat_template={tmp_path}/none.jinja")
    assert (
        template
        == f"data.chat_template: no file {tmp_path}/none.jinja; correct the path, or write Jinja text (with {{{{ or {{%) or `none`"
    )


def test_a_variable_that_the_chat_template_does_not_use_is_a_problem(tmp_path):
    own, other = "{{ messages }}{{ enable_thinking }}", "{{ messages }}{{ thinking }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": own}))
    tokenizer, kwargs = f"model.tokenizer={tmp_path}", "data.chat_template_kwargs.enable_thinking=false"
    assert told_of(tokenizer, kwargs) == [] == told_of(tokenizer, f"data.chat_template={other}")
    (unused,) = told_of(tokenizer, kwargs, f"data.chat_template={other}")
    said = "data.chat_template_kwargs: the chat template does not use `enable_thinking`; did you mean `thinking`?; "
    said += "correct the name, or leave it out"
    assert unused == said
    (tmp_path / "chat_template.jinja").write_text(other)
    assert told_of(tokenizer, kwargs) == [said]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": other}]})
    )
    assert told_of(tokenizer, kwargs) == []  # the run looks at the template that it uses


def test_a_reward_that_does_not_exist_is_a_problem(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from math import floor\n\ndef score(completions):\n    return [0.0]\n\nalias = score\n")
    for name in ("score", "alias", "floor"):
        assert told_of(f"rewards.functions.0.function={file}:{name}") == []
    (name,) = told_of(f"rewards.functions.0.function={file}:scores")
    assert name == f"rewards.functions.0.function: {file} defines no `scores`; did you mean `score`?; it defines score"
    (gone,) = told_of(f"rewards.functions.0.function={tmp_path}/gone.py:score")
    assert gone.startswith(f"rewards.functions.0.function: no file {tmp_path}/gone.py")
    (tool,) = told_of(f"multi_turn.tools=[{file}:add]")
    assert tool.startswith(f"multi_turn.tools.0: {file} defines no `add`")
    file.write_text("def score(:\n")
    (broken,) = told_of(f"rewards.functions.0.function={file}:score")
    assert broken.startswith(f"rewards.functions.0.function: {file}, line 1: not valid Python")


@pytest.mark.parametrize("name", [*BUILT_IN_REWARDS, "http://localhost:1/score", "model:judge"])
def test_an_argument_that_a_built_in_reward_lacks_is_a_problem_before_any_worker_starts(name):
    target, options = resolve(name), {"weigth": 1}
    loaded = describe(find(target), target, options)
    (problem,) = unknown_arguments(name, target, options, "rewards.functions.0.args")
    said = f"`{name}` has no such argument{did_you_mean('weigth', loaded['options'])}; it takes "
    assert str(problem) == f"rewards.functions.0.args.weigth: {said}{', '.join(loaded['options'])}"
    assert unknown_arguments(name, target, loaded["options"], "args") == []
    assert str(problem) in told_of(f"rewards.functions=[{{function: '{name}', args: {{weigth: 1}}}}]")


def test_gpus_that_no_colocated_server_uses_are_a_note():
    def noted(*overrides: str, gpu_memory_gb: float | None = 80) -> list[str]:
        settings = load_config(REPOSITORY / "configs" / "qwen2.5_7b_1node.yaml", overrides)
        return [str(note) for note in plan(settings, 8, gpu_memory_gb).notes if "idle" in note.text]

    said = "rollout.servers: {} of 8 GPUs are idle during generation; rollout.servers={} uses 8"
    assert noted() == [] == noted("rollout.servers=1", gpu_memory_gb=None)
    assert noted("rollout.servers=1", "rollout.tp=1") == [said.format(7, 8)]
    assert noted("rollout.servers=1") == [said.format(6, 4)]
    assert noted("rollout.servers=1", "rollout.placement=dedicated") == []


def test_a_plan_says_which_machine_it_assumes_in_lines_of_at_most_100_columns():
    settings = load_config(REPOSITORY / "configs" / "qwen2.5_7b_1node.yaml")
    without, eight = plan(settings, 8), plan(settings, 8, 80)
    assert (
        "\nmachine   no GPUs: 8 rank(s) share the RAM of a host; gpu_memory_gb=80 or --gpu h100 plans for GPUs\n"
        in str(without)
    )
    assert "\nmachine   8 GPU(s) of 80 GiB, one for each rank\n" in str(eight)
    assert max(map(len, str(eight).splitlines())) <= 100


def test_the_search_finds_nothing_much_faster_than_the_shipped_layout_for_experts():
    settings = load_config(REPOSITORY / "configs" / "qwen3_30b_a3b_1node.yaml")
    kind = GPUS["h200"]
    lengths = expected_lengths(settings)
    made = with_times(plan(settings, 8, kind.memory_gib), settings, 8, kind, lengths)
    assert made.times.step <= 1.01 * search(settings, made.model, 8, kind, lengths)[0].times.step
