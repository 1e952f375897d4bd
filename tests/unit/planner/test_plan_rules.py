"""Each rule of `megagrpo plan` is broken once, and a problem or a note names the key."""

import json
from pathlib import Path

from megagrpo.config import ConfigError, load_config
from megagrpo.planner import plan
from tests.unit.for_each import for_each

REPOSITORY = Path(__file__).parents[3]
LLAMA = dict(model_type="llama", hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
LLAMA |= dict(intermediate_size=1536, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
MIXED = LLAMA | dict(
    model_type="qwen3_moe", head_dim=64, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=192
)
SP = "parallel.sequence_parallel=true"
# rule: (ranks, overrides, the model's changes, key, beginning of the text)
PROBLEMS = {
    "heads": (2, ["parallel.tp=2"], {}, "parallel.tp: num_attention_heads=9 is not divisible"),
    "KV heads": (3, ["parallel.tp=3"], {"num_key_value_heads": 1}, "parallel.tp: num_key_value_heads=1 is not"),
    "width": (3, ["parallel.tp=3"], {"intermediate_size": 1537}, "parallel.tp: intermediate_size=1537 is not"),
    "layers": (4, ["parallel.pp=4"], {}, "parallel.pp: num_hidden_layers=30 is not divisible by pp x vpp = 4"),
    "vpp": (1, ["parallel.vpp=2"], {}, "parallel.vpp: 2 needs parallel.pp > 1"),
    "ranks": (3, ["parallel.pp=2"], {}, "world_size: 3 is not a multiple of parallel.tp"),
    "experts": (5, ["parallel.ep=5"], MIXED, "parallel.ep: the model's 12 experts are not divisible by ep=5"),
    "tp of experts": (3, ["parallel.tp=3"], MIXED, "parallel.sequence_parallel: false, but the experts of qwen3_moe"),
    "sequence parallel": (1, [SP], {}, "parallel.sequence_parallel: true needs parallel.tp > 1"),
    "micro-batch": (
        3,
        ["parallel.tp=3", SP, "train.max_tokens_per_micro_batch=80"],
        {},
        "train.max_tokens_per_micro_batch: 80 is cut to 78",
    ),
    "group": (1, ["rollout.num_generations=1"], {}, "rollout.num_generations: must be at least 2"),
    "steps": (1, ["algorithm.steps_per_generation=7"], {}, "algorithm.steps_per_generation: 7 does not divide"),
    "window": (
        1,
        ["rollout.max_prompt_length=8190", "train.max_tokens_per_micro_batch=9000"],
        {},
        "rollout.max_completion_length: max_prompt_length 8190 + max_completion_length 16 = 8206 tokens",
    ),
    "sample": (1, ["train.max_tokens_per_micro_batch=79"], {}, "train.max_tokens_per_micro_batch: 79 is less than"),
    "cache": (1, ["rollout.kv_cache_gb=0.001"], {}, "rollout.kv_cache_gb: 0.001 cannot hold one sequence"),
    "reward": (1, ["rewards.functions.0.function=exact_numbr"], {}, "rewards.functions.0.function: `exact_numbr` is"),
    "tokenizer": (1, [], {"vocab_size": 300}, "model.tokenizer: token 301 of"),
    "chosen experts": (1, [], MIXED | {"num_experts_per_tok": 13}, "model: num_experts_per_tok=13 is more than"),
    "architecture": (1, [], {"model_type": "gpt2"}, "model: architecture gpt2 is not supported"),
    "memory": (1, [], {"hidden_size": 57600}, "parallel.tp: a trainer rank needs 5145.0 GiB, but a GPU has 16"),
    "folder": (1, ["run.output_dir=/dev/null/runs"], {}, "run.output_dir: /dev/null/runs: /dev/null is not a folder"),
}
NOTES = {
    "vocabulary": (3, ["parallel.tp=3"], {"vocab_size": 49153}, "parallel.tp: the vocabulary of 49153 is padded"),
    "padding": (2, ["parallel.cp=2", "rollout.max_completion_length=25"], {}, "parallel.cp: every sample is padded"),
    "samples": (128, [], {}, "rollout.prompts_per_step: an optimizer step has 64 samples"),
    "prompts": (1, ["rollout.prompts_per_step=512", "data.train.size=100"], {}, "data.train: 57 prompts, but a step"),
    "template": (1, [], {}, "data.chat_template: the tokenizer in"),
    "end tokens": (1, [], {"eos_token_id": 2}, "model.tokenizer: generation_config.json ends responses at [2, 3]"),
}


def found(folder: Path, name: str, ranks: int, overrides: list[str], changes: dict) -> tuple[list, list]:
    """Problems and notes of a plan. A config that is refused has no notes."""
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 301}}}))
    settings = '{"eos_token": "b"}' if name == "template" else '{"chat_template": "{{ 1 }}"}'
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}' if name == "end tokens" else "{}")
    words = [f"model.path={folder}", f"run.output_dir={folder}", *overrides]
    try:
        config = load_config(REPOSITORY / "configs" / "quickstart.yaml", words)
    except ConfigError as error:
        return list(map(str, error.problems)), []
    made = plan(config, ranks, 16)
    return list(map(str, made.problems)), list(map(str, made.notes))


@for_each("name", PROBLEMS)
def test_a_broken_rule_is_a_problem(tmp_path, name):
    *case, text = PROBLEMS[name]
    assert any(problem.startswith(text) for problem in found(tmp_path, name, *case)[0])
    assert found(tmp_path, "", 1, [], {}) == ([], [])


@for_each("name", NOTES)
def test_what_only_deserves_a_look_is_a_note(tmp_path, name):
    *case, text = NOTES[name]
    problems, notes = found(tmp_path, name, *case)
    assert problems == [] and any(note.startswith(text) for note in notes)
