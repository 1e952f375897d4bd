import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megagrpo.config import ConfigError, cross_field_problems, load_config, render_help, save_resolved
from tests.unit.for_each import for_each

COMMITTED = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).split("\n  ")


@for_each("path", COMMITTED)
def test_every_committed_config_loads(path):
    assert cross_field_problems(load_config(path)) == []


def test_importing_the_config_needs_no_torch():
    heavy = "('torch', 'megatron', 'vllm', 'transformers')"
    code = f"import sys, megagrpo.config, megagrpo.__main__; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_all_problems_come_at_once_with_key_value_and_suggestion(tmp_path):
    path = write(
        tmp_path,
        "model: {pth: m}\nparallel: {tp: two, vpp: 2}\ndata: {train: {source: a}}\nnum_generatons: 4\n"
        "rewards: {functions: [{function: f, wieght: 2}]}\ntrain: {learning_rate: -1}\n",
    )
    header, *rest = problems(path, "rollout.temperature=hot")
    assert header == f"{path}: 8 problem(s)"
    assert sorted(rest) == sorted(
        [
            "model.path: required, but missing; set it",
            "model.pth: unknown key; did you mean model.path?",
            "parallel.tp: must be an integer (got 'two')",
            "rollout.temperature: must be a number (got 'hot')",
            "rewards.functions.0.wieght: unknown key; did you mean rewards.functions.0.weight?",
            "train.learning_rate: must be greater than 0 (got -1)",
            "num_generatons: unknown key; did you mean rollout.num_generations?",
            "parallel.vpp: 2 needs parallel.pp > 1; set vpp to 1 or raise pp",
        ]
    )


def test_fields_that_disagree_are_all_reported(tmp_path):
    path = write(
        tmp_path,
        SMALLEST + "parallel: {sequence_parallel: true, pp: 2, pipeline_layers: [4]}\nevaluation: {steps: 2}\n",
    )
    _, *rest = problems(path)
    assert [
        p.split(":")[0] for p in rest
    ] == "parallel.sequence_parallel parallel.pipeline_layers evaluation.steps".split()
    assert "[4] has 1 number(s), but pp 2 x vpp 1 = 2 stages; give one number of layers per stage" in rest[1]


def test_an_exact_kl_takes_no_correction(tmp_path):
    path = write(tmp_path, SMALLEST + "algorithm: {kl_estimator: full_reverse, use_bias_correction_kl: true}\n")
    _, problem = problems(path)
    assert problem == (
        "algorithm.use_bias_correction_kl: true corrects an estimate, but kl_estimator full_reverse is exact; set it "
        "to false, or choose k1 or k3"
    )
    assert load_config(path, ["algorithm.kl_estimator=k3"]).algorithm.use_bias_correction_kl


def test_prompts_are_shared_unless_transformer_engine_cannot(tmp_path):
    def shares(*overrides: str) -> tuple[bool, bool]:
        made = load_config(write(tmp_path, SMALLEST), list(overrides))
        return made.shares_prompts(transformer_engine=True), made.shares_prompts(transformer_engine=False)

    assert shares() == shares("train.share_prompts=true", "parallel.cp=2") == (True, True)
    assert shares("parallel.cp=2") == shares("model.fusions=[rope]") == (False, True)
    assert shares("train.share_prompts=false") == (False, False)
    with pytest.raises(ConfigError, match="share_prompts: true lets positions continue a prompt's"):
        shares("train.share_prompts=true", "model.fusions=[rope]")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["train.fused_logprobs=true", "rollout.top_k=5"],
            "train.fused_logprobs: true writes no logits, which rollout.top_p",
        ),
        (
            ["train.fused_logprobs=true", "algorithm.kl_estimator=full_reverse"],
            "which kl_estimator full_reverse needs; set it to false",
        ),
        (
            ["train.logprobs_fp8_recipe=blockwise"],
            "logprobs_fp8_recipe: blockwise needs the fused kernels; choose none",
        ),
    ],
)
def test_fused_logprobs_are_not_asked_for_what_they_cannot_do(tmp_path, overrides, said):
    path = write(tmp_path, SMALLEST)
    (problem,) = problems(path, "algorithm.beta=0.1", *overrides)[1:]
    assert said in problem
    assert load_config(
        path,
        ["train.fused_logprobs=true", "train.logprobs_fp8_recipe=blockwise", "algorithm.kl_estimator=full_reverse"],
    )


@pytest.mark.parametrize(
    ("override", "left_out"), [("run.seed=1", True), ("algorithm.skip_zero_advantage=false", False)]
)
def test_samples_without_advantage_are_computed_when_told_so(tmp_path, override, left_out):
    path = write(tmp_path, SMALLEST)
    assert load_config(path, [override]).algorithm.leaves_out_zero_advantage == left_out
    for other_gradient in (
        "algorithm.beta=0.1",
        "algorithm.router_aux_loss_coef=0.01",
        "algorithm.moe_router_bias_update_rate=0.001",
    ):
        assert not load_config(path, [override, other_gradient]).algorithm.leaves_out_zero_advantage


@pytest.mark.parametrize(
    ("wrong", "contradiction"),
    [
        # the last word of the wrong key, `tp`, occurs in the sentence about another key
        (["rollout.tp=x"], ["parallel.sequence_parallel=true", "parallel.vpp=2"]),
        (["data.train.size=x"], ["data.curriculum=[0.9,0.1]"]),
        (["rewards.functions=5"], ["evaluation.steps=2"]),
        (["evaluation.sets={'bad name': {source: a}}"], ["train.warmup_steps=1000"]),
        (["multi_turn.tools=3"], ["multi_turn.max_turns=3", "parallel.vpp=2"]),
        (["model=3", "run={2: 3}", "lora.target_modules=[1]"], ["train.min_learning_rate=1"]),
    ],
)
def test_a_contradiction_is_named_beside_wrong_values_of_other_keys(tmp_path, wrong, contradiction):
    path = write(tmp_path, SMALLEST)
    with pytest.raises(ConfigError) as alone:
        load_config(path, [c for c in contradiction if not c.startswith("multi_turn")])
    found = problems(path, *wrong, *contradiction)
    assert set(map(str, alone.value.problems)) <= set(found)
    assert len(found) > 1 + len(alone.value.problems)


def test_a_contradiction_that_a_wrong_value_may_cause_waits_until_that_is_right(tmp_path):
    path = write(tmp_path, SMALLEST)
    said = ["parallel.tp: must be an integer (got 'x')"]
    assert problems(path, "parallel.tp=x", "parallel.sequence_parallel=true")[1:] == said
    (one,) = problems(path, "rewards=3")[1:]
    assert one.startswith("rewards: ")


def test_a_wrong_value_does_not_cause_a_second_problem_about_its_default(tmp_path):
    path = write(tmp_path, SMALLEST + "parallel: {tp: two, sequence_parallel: true}\n")
    assert len(problems(path)) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E+2", 100.0), (".5", 0.5), ("2", 2.0), ("6.02e23", 6.02e23), ("'1e-5'", 1e-5)],
)
def test_numbers_are_numbers(tmp_path, text, value):
    config = load_config(write(tmp_path, SMALLEST), [f"train.learning_rate={text}"])
    assert config.train.learning_rate == value and isinstance(config.train.learning_rate, float)


def test_words_that_older_yaml_takes_for_booleans_or_times_stay_words(tmp_path):
    written = write(tmp_path, SMALLEST + "algorithm: {importance_correction: off}\n")
    config = load_config(written, ["data.columns={a: yes, b: 1:30}", "run.name=off"])
    assert (
        config.algorithm.importance_correction == "off"
        and config.run.name == "off"
        and config.data.columns == {"a": "yes", "b": "1:30"}
    )


def test_values_inside_free_options_keep_their_yaml_types(tmp_path):
    config = load_config(
        write(tmp_path, SMALLEST), ["data.train.options={seed: 3, p: 1e-2, on: true, none: null, s: '8'}"]
    )
    assert config.data.train.options == {"seed": 3, "p": 0.01, "on": True, "none": None, "s": "8"}


def test_defaults_chain_merges_sections_and_replaces_lists(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, SMALLEST + "train: {learning_rate: 1e-4, weight_decay: 0.1}\n", "base.yaml")
    write(tmp_path, "defaults: base.yaml\ntrain: {learning_rate: 2e-4}\n", "middle.yaml")
    leaf = write(
        tmp_path / "sub", "defaults: ../middle.yaml\nrewards: {functions: [{function: format}]}\n", "leaf.yaml"
    )
    config = load_config(leaf, ["train.weight_decay=0.3"])
    assert (config.train.learning_rate, config.train.weight_decay) == (2e-4, 0.3)
    assert [f.function for f in config.rewards.functions] == ["format"]


def test_a_circle_of_defaults_is_named(tmp_path):
    write(tmp_path, "defaults: b.yaml\n", "a.yaml")
    write(tmp_path, "defaults: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"cycle: a.yaml -> b.yaml -> a.yaml"):
        load_config(tmp_path / "a.yaml")


def test_an_error_about_a_missing_parent_names_the_file_that_refers_to_it(tmp_path):
    leaf = write(tmp_path, "defaults: gone.yaml\n")
    with pytest.raises(
        ConfigError,
        match=r"gone.yaml: cannot read it: No such file or directory \(named by `defaults:` in .*run.yaml\)",
    ):
        load_config(leaf)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {name: a}\nmodel: [1,\n", r"run.yaml, line 3, column 1: not valid YAML"),
        ("run: {name: a}\nrun: {name: b}\n", r"line 2, column 1: not valid YAML: duplicate key 'run'; remove one"),
        ("- 1\n", r"must hold `section: ...` keys at the top, not a list"),
        ("defaults: [a, b]\n", r"`defaults:` must name one file"),
    ],
)
def test_broken_files_are_named_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_overrides_reach_list_elements_and_empty_sections(tmp_path):
    path = write(tmp_path, SMALLEST)
    config = load_config(
        path,
        ["rewards.functions.0.weight=2", "--data.eval.source=held.jsonl", "rewards.functions.0.args.tolerance=0.1"],
    )
    assert config.rewards.functions[0].weight == 2 and config.rewards.functions[0].args == {"tolerance": 0.1}
    assert config.data.eval.source == os.path.abspath("held.jsonl") and config.data.eval.split == "train"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate", "not an override; write section.key=value"),
        ("rewards.functions.1.weight=2", r"the list has elements 0 to 0 \(got '1'\)"),
        ("model.path.x=1", "model.path is a scalar and has no keys"),
        ("learning_rate=1", r"learning_rate: unknown key; did you mean train.learning_rate\?"),
    ],
)
def test_overrides_that_fit_nowhere_are_explained(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, SMALLEST), [override])


@for_each("path", COMMITTED)
def test_the_resolved_config_loads_back_equal(path, tmp_path):
    options = "data.train.options={text: '1e-5', flag: 'off', number: 1e-7}"
    config = load_config(path, [options, "data.system_prompt='π: yes\n'", f"run.output_dir={tmp_path}"])
    assert load_config(save_resolved(config, tmp_path / "run")) == config


def test_help_prints_every_key_with_its_type_default_and_docstring():
    text = render_help()
    assert "  train.learning_rate  (float > 0, default 1.0e-06)\n      Peak learning rate of AdamW" in text
    assert "  model.path  (str, required)" in text
    assert "  run.wandb.mode  (online | offline | empty, default empty)" in text
    assert "  rewards.functions.N.weight  (float, default 1.0)" in text
    assert "  data.eval.source" in text and "  evaluation.num_generations" in text


def test_experts_cannot_be_shared_out_over_one_worker(tmp_path):
    path = write(tmp_path, SMALLEST)
    _, found = problems(path, "rollout.enable_expert_parallel=true")
    assert (
        found == "rollout.enable_expert_parallel: true needs several workers per server, "
        "but rollout.tp and rollout.dp are 1; set it to false, or raise tp or dp"
    )
    assert load_config(path, ["rollout.enable_expert_parallel=true", "rollout.tp=2"]).rollout.enable_expert_parallel


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollout.dp=2"],
            "rollout.dp: 2 copies of the attention share experts, but rollout.enable_expert_parallel is false; set it "
            "to true",
        ),
        (
            ["rollout.dp=2", "rollout.enable_expert_parallel=true", "run.nodes=2", "rollout.servers=2"],
            "rollout.dp: 2 needs servers whose reports the trainer can read, but colocated servers are on 2 nodes; "
            "choose dedicated",
        ),
    ],
)
def test_sizes_of_a_server_that_contradict_each_other_are_refused(overrides, said, tmp_path):
    _, found = problems(write(tmp_path, SMALLEST), *overrides)
    assert found.startswith(said)


MULTI_TURN = {
    "multi_turn.max_turns=3": "multi_turn.max_turns: has no effect without a scheduler, tools, an environment or an "
    "agent; name one",
    "multi_turn.agent={function: 'json:loads', command: [a]}": "multi_turn.agent: must be the agent's function, or a mapping with",
    "multi_turn.agent={function: 'json:loads', roles: [a]}": "multi_turn.agent: roles must map names",
    "multi_turn.agent={function: 'json:loads', roles: {a: -1}}": "multi_turn.agent: roles.a: -1 is no weight; give",
    "multi_turn.agent={function: 'json:loads', roles: {a: .nan}}": "multi_turn.agent: roles.a: nan is no weight; give",
    "multi_turn.agent={function: 'json:loads', roles: {a: 0}}": "multi_turn.agent: roles: no role has a weight above 0",
    "multi_turn={agent: 'json:loads', tools: [calculator]}": "multi_turn.agent: an agent answers the policy itself",
    "multi_turn={agent: 'json:loads', environment: 'json:JSONDecoder'}": "multi_turn.agent: an agent answers the",
    "multi_turn={agent: 'json:loads', scheduler: math_tip_trick}": "multi_turn.agent: an agent answers the policy",
    "multi_turn={agent: 'json:loads', timeout: 3}": "multi_turn.timeout: has no effect on an agent, which calls",
    "multi_turn={agent: 'json:loads', max_tool_calling_iterations: 3}": "multi_turn.max_tool_calling_iterations: has no effect on an agent",
    "multi_turn={tools: [calculator], scheduler_args: {attempts: "
    "3}}": "multi_turn.scheduler_args: needs a scheduler; set",
    "multi_turn={tools: [calculator], environment_args: {size: 3}}": "multi_turn.environment_args: needs an environment",
    "multi_turn={tools: [calculator], reuse_environments: true}": "multi_turn.reuse_environments: needs an environment",
    "multi_turn={tools: [calculator], container: 'run {command}'}": "multi_turn.container: needs an environment",
    "multi_turn={environment: 'mcp:notes', container: docker run image}": "multi_turn.container: starts no environment",
    "multi_turn={environment: 'mcp:notes', container: 'run \"{command}'}": "multi_turn.container: cannot be split",
    "multi_turn={environment: 'mcp:notes', container: 'run {command}', scheduler: math_tip_trick}": (
        "multi_turn.container: holds the environment only"
    ),
    "multi_turn={scheduler: math_tip_trick, tool_parser: "
    "'vllm:hermes'}": "multi_turn.tool_parser: vllm:hermes needs tools; name tools",
    "multi_turn={tools: [calculator], tool_parser: xml}": "multi_turn.tool_parser: must match the pattern",
    "multi_turn={scheduler: math_tip_trick, max_tool_calling_iterations: "
    "2}": "multi_turn.max_tool_calling_iterations: 2 needs tools",
    "multi_turn={scheduler: math_tip_trick, max_result_chars: 9}": "multi_turn.max_result_chars: 9 needs tools",
    "multi_turn={tools: [calculator], retries: 2}": "multi_turn.retries: 2 needs a scheduler, an environment or an agent",
    "multi_turn={tools: [calculator], max_seconds: 0}": "multi_turn.max_seconds: must be greater than 0",
    "multi_turn={tools: [calculator], max_response_length: 100}": (
        "multi_turn.max_response_length: 100 is less than one turn, rollout.max_completion_length 256"
    ),
    "multi_turn={tools: [calculator], max_response_length: 4000}": (
        "train.max_tokens_per_micro_batch: 4096 is less than the longest sample, rollout.max_prompt_length 512 + "
        "multi_turn.max_response_length 4000 = 4512"
    ),
}


@for_each(("override", "problem"), MULTI_TURN.items())
def test_options_of_several_turns_that_say_nothing_or_contradict_are_refused(tmp_path, override, problem):
    _, found = problems(write(tmp_path, SMALLEST), override)
    assert found.startswith(problem)


def test_something_must_give_rewards(tmp_path):
    path = write(tmp_path, SMALLEST)
    _, found = problems(path, "rewards.functions=[]")
    assert found.startswith(
        "rewards.functions: the run has no rewards; name a function, or a scheduler, environment or"
    )
    for gives in ("environment=safe.py:Safe", "agent=mine.py:run"):
        assert load_config(path, ["rewards.functions=[]", f"multi_turn.{gives}"]).rewards.functions == []


def test_a_system_prompt_does_not_reach_an_agent(tmp_path):
    _, found = problems(write(tmp_path, SMALLEST), "multi_turn.agent=mine.py:run", "data.system_prompt=Hi")
    assert found.startswith("data.system_prompt: has no effect on an agent")


def test_limits_of_several_turns_make_the_longest_sample(tmp_path):
    path = write(tmp_path, SMALLEST)
    assert load_config(path, ["multi_turn={tools: [calculator]}"]).max_model_len == 512 + 256
    longest = "multi_turn={tools: [calculator], max_response_length: 1000}"
    assert load_config(path, [longest]).max_model_len == 512 + 1000


def test_a_key_with_half_a_character_is_no_override(tmp_path):
    (said,) = problems(write(tmp_path, SMALLEST), "\ud800=null")[1:]
    assert said.endswith(": not an override; write section.key=value")


def test_a_config_of_an_earlier_version_loads_where_removed_keys_have_their_default(tmp_path):
    values = yaml.safe_load(SMALLEST) | {"run": {"otel": {"endpoint": None, "conversations": 16}}}
    values["data"] |= {"curriculum": "off", "curriculum_low": 0.1}
    assert load_config(write(tmp_path, yaml.safe_dump(values))).data.curriculum == []
    values["data"]["curriculum_low"] = 0.2
    with pytest.raises(ConfigError, match=r"data.curriculum_low: no longer a key"):
        load_config(write(tmp_path, yaml.safe_dump(values)))
