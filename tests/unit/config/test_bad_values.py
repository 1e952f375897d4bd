"""Invalid config values are refused in one line with key, value, rule and fix, before anything starts."""

import json
import resource
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config
from megagrpo.planner import plan
from tests.unit.for_each import for_each

SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
LLAMA = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA |= dict(intermediate_size=128, vocab_size=256, max_position_embeddings=2048, rms_norm_eps=1e-6)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run.yaml").write_text(SMALLEST)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' * 8)
    return tmp_path / "run.yaml"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return tmp_path / "model"


def refusal(path: Path, *overrides: str) -> str:
    """The only problem of the config."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 2 and "Traceback" not in lines[-1] and len(lines[-1]) < 500
    return lines[-1].strip()


VALUES = {
    "train.learning_rate=abc": "train.learning_rate: must be a number (got 'abc')",
    "train.learning_rate=.nan": "train.learning_rate: must be a finite number (got nan)",
    "train.learning_rate=0": "train.learning_rate: must be greater than 0 (got 0)",
    "rollout.num_generations=2.5": "rollout.num_generations: must be an integer (got 2.5)",
    "rollout.enforce_eager=maybe": "rollout.enforce_eager: must be true or false (got 'maybe')",
    "algorithm.loss_type=dappo": "algorithm.loss_type: must be 'grpo', 'bnpo', ",
    "run={name: 3}": "run.name: must be a string (got 3); put it in quotes",
    "run.name=": "run.name: must match the pattern ^[A-Za-z0-9][A-Za-z0-9._-]*$ (got '')",
    "run.name='a'": "run.name: must match the pattern ^[A-Za-z0-9][A-Za-z0-9._-]*$ (got \"'a'\"); leave the quotes out",
    "model.precision='bf16'": "model.precision: must be 'auto', 'bf16', 'fp16' or 'fp32' (got \"'bf16'\"); did you mean bf16?",
    "algorithm={importance_correction: "
    "false}": "algorithm.importance_correction: must be 'off', 'token_truncate', 'token_mask', ",
    "run.trackers=wandb": "run.trackers: must be a list (got 'wandb'); write [wandb]",
    "run.max_steps=20 # twenty": "run.max_steps=20 # twenty, line 1, column 3: not valid YAML: the text from # on is "
    "a comment, which",
    "run.wandb.tags=[a, #b]": "run.wandb.tags=[a, #b], line 1, column 4: not valid YAML: the text from # on is a "
    "comment, which",
    "data.train.options={a: '#', b: "
    "#}": "data.train.options={a: '#', b: #}, line 1, column 12: not valid YAML: the text from # on is a",
    "rollout.token_file=": "rollout.token_file: must not be empty; write a name or a path, or leave it out",
    "run.output_dir=~no_such_user/runs": "run.output_dir: ~no_such_user/runs: this machine has no user no_such_user; "
    "write the folder out",
    "data.train.source=a\udcffb.jsonl": "data.train.source: 'a\\udcffb.jsonl' contains a lone surrogate, \\udcff, "
    "which files and tokenizers reject; rename it in UTF-8",
    "rewards.functions=3": "rewards.functions: must be a list (got 3)",
    "train=3": "train: must be a mapping of `key: value` (got 3)",
    "run.seed=18446744073709551616": "run.seed: must be at most 9223372036854775807 = 2^63 - 1 (got "
    "18446744073709551616)",
    "run.max_steps=true": "run.max_steps: must be a number, not true or false (got True)",
    "debug.dump_steps=[1, true]": "debug.dump_steps: must be a number, not true or false (got [1, True])",
    "train.learning_rate=false": "train.learning_rate: must be a number, not true or false (got False)",
    "rollout.temperature=2.01": "rollout.temperature: must be at most 2 (got 2.01)",
    "rollout.temperature=1e-30": "rollout.temperature: must be at least 0.01 (got 1e-30)",
    "evaluation.temperature=1e-30": "evaluation.temperature: must be 0 (greedy) or at least 0.01, the lowest "
    "temperature that vLLM",
    "evaluation.temperature=3": "evaluation.temperature: must be at most 2 (got 3)",
    "rollout.port=70000": "rollout.port: must be at most 65535 (got 70000)",
    "rollout.servers=100000": "rollout.servers: must be at most 4096 (got 100000)",
    "rewards.workers=100000000": "rewards.workers: must be at most 4096 (got 100000000)",
    "multi_turn.workers=100000000": "multi_turn.workers: must be at most 4096 (got 100000000)",
    "rollout.prompts_per_step=1000000000000": "rollout.prompts_per_step: 1000000000000 x num_generations 8 = "
    "8000000000000 samples; the limit per step is 10000000; lower one of them",
    "rollout.startup_timeout=1e300": "rollout.startup_timeout: must be at most 100000000 (got 1e+300)",
    "parallel.timeout_minutes=1e300": "parallel.timeout_minutes: must be at most 1000000 (got 1e+300)",
    "run.time_limit=9999999999999:00:00": "run.time_limit: must match the pattern",
    f"run.name={'a' * 300}": "run.name: must have at most 200 characters (got 'aaa",
    "rollout.urls=['http://a:99999']": "rollout.urls.0: http://a:99999 is not a valid URL: Port out of range 0-65535; "
    "write it as",
    "rollout.urls=['http://a:1', "
    "localhost]": "rollout.urls.1: localhost does not start with http:// or https://; write it as http://HOST:",
    "rollout.urls=['http://']": "rollout.urls.0: http:// has no valid host name; write it as http://HOST:PORT",
    "rollout.urls=['http://[a']": "rollout.urls.0: http://[a is not a valid URL: Invalid IPv6 URL; write it as "
    "http://HOST:PORT",
}


@for_each("override", VALUES)
def test_a_value_that_nothing_could_run_with_is_refused(path, override):
    assert refusal(path, override).startswith(VALUES[override])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.fp8_recipe=tensorwise", "fp16 does not support model.fp8_recipe tensorwise; choose none, or bf16"),
        ("model.base_storage=nf4", "fp16 does not support model.base_storage nf4; choose none, or bf16"),
        ("rollout.quantization=fp8_per_channel", "vLLM computes rollout.quantization fp8_per_channel in bf16;"),
        ("parallel={ep: 2, expert_dispatcher: deepep}", "deepep sends bf16 only, but model.precision is fp16; choose"),
        ("train.overlap=[tp]", "needs bf16, but model.precision is fp16"),
        ("train.overlap=[experts]", "needs bf16, but model.precision is fp16"),
    ],
)
def test_fp16_excludes_what_computes_in_bf16(path, override, said):
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["model.precision=fp16", "algorithm.importance_correction=token_mask", override])
    assert said in str(caught.value)


GAE, WARM = "algorithm.advantage_estimator=gae", "algorithm.critic.warmup_steps=8"
TURNS = "multi_turn={scheduler: math_tip_trick}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.critic.gamma=0.9"],
            "algorithm.critic.gamma: 0.9 only applies with",
        ),
        (["rollout.num_generations=1"], "rollout.num_generations: must be at least 2 (got 1)"),
        ([GAE, "algorithm.advantage_by=state", TURNS], "algorithm.advantage_by: state is not supported with"),
        ([GAE, "algorithm.critic.gamma=1.5"], "algorithm.critic.gamma: must be at most 1 (got 1.5)"),
        ([GAE, "algorithm.critic.gae_lambda=-0.1"], "algorithm.critic.gae_lambda: must be at least 0 (got -0.1)"),
        ([GAE, "algorithm.critic.value_clip=0"], "algorithm.critic.value_clip: must be greater than 0 (got 0)"),
        ([GAE, "algorithm.critic.learning_rate=0"], "algorithm.critic.learning_rate: must be greater than 0"),
        ([GAE, WARM, "run.max_steps=8"], "algorithm.critic.warmup_steps: 8 leaves no step of 8 in which the policy"),
        ([GAE, WARM, "run.max_steps=9", "debug.dump_steps=[9,8]"], "debug.dump_steps: 8 is a step in which only the"),
    ],
)
def test_a_critic_needs_gae_and_gae_what_a_critic_can(path, overrides, said):
    assert said in refusal(path, *overrides)


def test_a_misspelt_choice_gets_the_nearest_one(path):
    assert refusal(path, "algorithm.loss_type=dappo").endswith(
        "', or your own as FILE.py:NAME (got 'dappo'); did you mean dapo?"
    )


def test_ports_of_all_servers_exist(path):
    said = (
        "rollout.port: 65535 with rollout.servers 2 needs ports up to 65536, above the limit 65535; lower it, or set "
        "it to 0"
    )
    assert refusal(path, "rollout.port=65535", "rollout.servers=2") == said
    assert load_config(path, ["rollout.port=65534", "rollout.servers=2"])


@for_each(
    ("yaml", "said"),
    [
        ("run: {? [a] : 1}", "line 4, column 9: not valid YAML: run: a key must be a scalar, not a list or a mapping"),
        ("run: {? {a: 1} : 1}", "line 4, column 9: not valid YAML: run: a key must be a scalar"),
        ("run: " + "[" * 5000 + "]" * 5000, "not valid YAML: lists and mappings are nested deeper than 50 levels"),
        ("run: " + "[" * 60 + "]" * 60, "lists and mappings are nested deeper than 50 levels; write them flat"),
        ("run: {seed: " + "9" * 5000 + "}", "line 4, column 13: not valid YAML: run.seed: the integer has 5000 digits"),
        ("run: &a {x: *a}", "run.x: the value contains itself; write the values out"),
        (
            "a: &a [" + "1," * 999 + "]\nb: &b [" + "*a," * 99 + "]\nc: [*b, *b]",
            "more than 100000 values, the limit; write fewer",
        ),
        ('run: {output_dir: "a\\0b"}', "run.output_dir: 'a\\x00b' contains a zero byte"),
        ('run: {output_dir: "a\\ud800b"}', "run.output_dir: 'a\\ud800b' contains a lone surrogate"),
        (
            "run: {seed: !!timestamp 2}",
            "run.seed: '2' is not a valid value of the tag tag:yaml.org,2002:timestamp; leave the tag out",
        ),
        ("run: !!set {a}", "run: the tag tag:yaml.org,2002:set is not supported; leave it out"),
    ],
)
def test_yaml_that_a_config_cannot_hold_is_named_with_line_and_key(path, yaml, said):
    path.write_text(f"{SMALLEST}{yaml}\n")
    assert said in refusal(path)
    path.write_text(SMALLEST)
    key, _, value = yaml.partition(": ")
    if "\n" not in yaml and "&" not in yaml:
        assert refusal(path, f"{key}={value}").startswith(f"{key}={value}"[:20])


def test_a_device_without_end_is_no_config(path):
    path.write_text("defaults: /dev/zero\n")
    assert refusal(path).startswith("/dev/zero: cannot read it: it is no regular file (named by `defaults:` in ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**23  # in KiB


def problems(path: Path, model: Path, *overrides: str, **plan_options) -> list[str]:
    config = load_config(path, [f"model.path={model}", f"run.output_dir={path.parent}", *overrides])
    return list(map(str, plan(config, 1, **plan_options).problems))


def test_a_file_is_no_model(path):
    assert problems(path, Path("/etc/passwd")) == [
        "model.path: /etc/passwd is a file; name the folder that holds config.json and safetensors"
    ]


def test_a_home_folder_of_an_unknown_user_is_no_model(path):
    said = "model.path: ~no_such_user/m: this machine has no user no_such_user; write the folder out"
    assert refusal(path, "model.path=~no_such_user/m") == said


@pytest.mark.parametrize("reward", ["http://", "http:///score", "https://a:99999/score"])
def test_a_reward_without_a_host_is_refused(path, model, reward):
    (said,) = problems(path, model, f"rewards.functions.0.function={reward}")
    assert said.startswith(f"rewards.functions.0.function: `{reward}` ") and said.endswith(
        "; write it as http://HOST:PORT/PATH"
    )


def test_caches_that_the_machine_has_no_memory_for_are_refused(path, model):
    assert problems(path, model, "rollout.kv_cache_gb=100000", host_memory_gb=31.25) == [
        "rollout.kv_cache_gb: 100000 x rollout.servers 1 = 100000 GiB, but this machine has 31.2 GiB of RAM; lower one "
        "of them"
    ]
    (said,) = problems(path, model, "rollout.servers=4000", host_memory_gb=31.25)
    assert said.startswith("rollout.kv_cache_gb: 2 x rollout.servers 4000")
    assert problems(path, model, "rollout.servers=4000", gpu_memory_gb=80.0, host_memory_gb=31.25) == []
    assert problems(path, model, host_memory_gb=31.25) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", " is not valid JSON: "),
        ("[1]", " must contain a JSON object; download it again, or delete it"),
        ('{"eos_token_id": 256}', "model.path: eos_token_id 256 in "),
        ('{"eos_token_id": [2, 9999]}', " is not a token of the model (vocab_size 256); use an id below that"),
        ('{"eos_token_id": "a"}', "model.path: eos_token_id 'a' in "),
        ('{"eos_token_id": [[1]]}', "model.path: eos_token_id [1] in "),
    ],
)
def test_end_tokens_that_cannot_be_read_or_that_the_model_lacks_are_refused(path, model, text, said):
    (model / "generation_config.json").write_text('{"eos_token_id": [255]}')
    assert problems(path, model) == []
    (model / "generation_config.json").write_text(text)
    (found,) = problems(path, model)
    assert found.startswith("model.path: ") and said in found and "generation_config.json" in found


@for_each("key", ["rope_scaling", "rope_parameters"])
@for_each("rope", [{"rope_type": "helix", "factor": 2.0}, {"type": "helix"}, "helix", [1], {"rope_type": ["yarn"]}])
def test_a_rotary_scaling_that_is_not_known_is_refused(path, model, key, rope):
    (model / "config.json").write_text(json.dumps(LLAMA | {key: rope}))
    (said,) = problems(path, model)
    assert said.startswith("model: ") and ("rope_type" in said or key in said)


def test_a_rotary_scaling_that_only_vllm_would_read_is_refused_too(path, model):
    (model / "config.json").write_text(
        json.dumps(LLAMA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "helix"}})
    )
    (said,) = problems(path, model)
    assert said.startswith("model: rope_type 'helix' is not supported for llama; supported: default, ")


def test_a_folder_that_linux_has_no_name_for_is_refused(path, model):
    config = load_config(path, [f"model.path={model}", f"run.output_dir={'b' * 300}"])
    (said,) = map(str, plan(config, 1).problems)
    assert (
        said.startswith("run.output_dir: bbbb")
        and "has 300 bytes; the limit for a file name is 255; name another folder" in said
    )


@for_each(
    ("override", "said"),
    [
        ("rewards.functions=[{function: exact_number}]", "rewards.functions: this has no effect: loss_type sft learns"),
        ("rollout.temperature=0.5", "rollout.temperature: 0.5 has no effect: loss_type sft learns from the responses"),
        ("data.curriculum=[0.1,0.9]", "data.curriculum: this has no effect"),
        ("algorithm.beta=0.1", "algorithm.beta: 0.1 has no effect: loss_type sft has no reference"),
    ],
)
def test_a_run_on_rows_refuses_what_only_sampling_uses(path, override, said):
    assert refusal(path, "rewards.functions=[]", "algorithm.loss_type=sft", override).startswith(said)
