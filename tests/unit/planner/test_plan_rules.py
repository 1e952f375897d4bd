"""Each of the 25 rules of `megagrpo plan` is broken once, and its verdict reports it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, load_config
from megagrpo.planner import plan
from megagrpo.planner.rules.plan_rules import PLAN_RULES, verdicts
from tests.unit.for_each import for_each

REPOSITORY = Path(__file__).parents[3]
LLAMA = dict(model_type="llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
LLAMA |= dict(intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
MIXED = LLAMA | dict(
    model_type="qwen3_moe", head_dim=64, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=192
)
SP = "parallel.sequence_parallel=true"
BROKEN = {  # number: (ranks, overrides, the model's changes)
    1: (2, ["parallel.tp=2"], {}),
    2: (3, ["parallel.tp=3"], {"num_key_value_heads": 1}),
    3: (3, ["parallel.tp=3"], {"intermediate_size": 1537}),
    4: (3, ["parallel.tp=3"], {"vocab_size": 49153}),
    5: (4, ["parallel.pp=4"], {}),
    6: (3, ["parallel.pp=2"], {}),
    7: (5, ["parallel.ep=5"], MIXED),
    8: (1, [SP], {}),
    9: (2, ["parallel.cp=2", "rollout.max_completion_length=25"], {}),
    10: (1, ["rollout.num_generations=1"], {}),
    11: (128, [], {}),
    12: (1, ["algorithm.steps_per_generation=7"], {}),
    13: (1, ["rollout.prompts_per_step=512", "data.train.size=100"], {}),
    14: (1, ["rollout.max_prompt_length=8190", "train.max_tokens_per_micro_batch=9000"], {}),
    16: (1, [], {}),
    17: (1, [], {"eos_token_id": 2}),
    18: (1, ["rewards.functions.0.function=exact_numbr"], {}),
    19: (1, [], {"vocab_size": 300}),
    20: (1, [], {"hidden_size": 57600}),
    25: (1, ["run.output_dir=/dev/null/runs"], {}),
}
MORE = {  # other ways to break the same rules
    "topk": (19, 1, [], MIXED | {"num_experts_per_tok": 13}),
    "tp_of_experts": (7, 3, ["parallel.tp=3"], MIXED),
    "vpp": (5, 1, ["parallel.vpp=2"], {}),
    "architecture": (19, 1, [], {"model_type": "gpt2"}),
    "micro_batch": (9, 3, ["parallel.tp=3", SP, "train.max_tokens_per_micro_batch=80"], {}),
    "window": (14, 1, ["train.max_tokens_per_micro_batch=79"], {}),
    "cache": (14, 1, ["rollout.kv_cache_gb=0.001"], {}),
}


def state(folder: Path, number: int, ranks: int, overrides: list[str], changes: dict) -> str:
    """The verdict on a rule; if the config itself is refused, the plan contains nothing else."""
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "tokenizer_config.json").write_text("{}" if number != 16 else '{"eos_token": "</s>"}')
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 301}}}))
    (folder / "tokenizer_config.json").write_text(
        '{"eos_token": "b"}' if number == 16 else '{"chat_template": "{{ 1 }}"}'
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}' if number == 17 else "{}")
    try:
        config = load_config(
            REPOSITORY / "configs" / "quickstart.yaml", [f"model.path={folder}", f"run.output_dir={folder}", *overrides]
        )
    except ConfigError as error:
        (problem,) = error.problems
        # rule 10 is the range of this key: a valid config cannot break it
        if problem.keys == ("rollout.num_generations",):
            problem = replace(problem, rule=10)
        found = verdicts([problem], [], gpu=True)
    else:
        found = plan(config, ranks, 16).rules
    return next(verdict.state for verdict in found if verdict.rule.number == number)


@for_each("number", BROKEN)
def test_a_broken_rule_is_named(tmp_path, number):
    assert state(tmp_path, number, *BROKEN[number]) == ("note" if number in (4, 9, 11, 13, 16, 17) else "broken")
    assert state(tmp_path, number if number not in (16, 17) else 1, 1, [], {}) in ("holds", "unknown")


@pytest.mark.parametrize("name", MORE)
def test_rules_are_broken_in_several_ways(tmp_path, name):
    assert state(tmp_path, *MORE[name]) == "broken"


def test_the_25_rules_are_there_and_what_only_the_machine_knows_is_said_so(tmp_path):
    assert [rule.number for rule in PLAN_RULES] == list(range(1, 26))
    silent = {rule.number for rule in PLAN_RULES} - set(BROKEN)
    assert silent == {15, 21, 22, 23, 24} and all(rule.elsewhere for rule in PLAN_RULES if rule.number in silent)
    assert all(state(tmp_path, number, 1, [], {}) == "unknown" for number in silent)
