"""Presets are settings of published systems: they load, name their source, and contain the published values."""

from pathlib import Path

import pytest
import yaml

from megagrpo.config import load_config
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import load_tokenizer, tokenizer_of
from megagrpo.planner import plan
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Rollout
from tests.unit.data.test_chat_templates import QWEN3, QWEN3_THINKING, R1
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.for_each import for_each

PRESETS = sorted((Path(__file__).parents[3] / "configs" / "presets").glob("*.yaml"))
OWN = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"


def load(name: str, folder: Path):
    """A preset with a user's own model, data and reward."""
    mine = folder / "mine.yaml"
    mine.write_text(f"defaults: {PRESETS[0].parent / name}.yaml\n{OWN}")
    return load_config(mine)


@for_each("path", PRESETS)
def test_every_preset_loads_and_says_its_source_and_where_it_differs(path, tmp_path):
    load(path.stem, tmp_path)
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert "Differs:" in header and any(word in header for word in ("arXiv", "commit", "TRL 1.16", "PR #", "notebook"))


def test_the_presets_that_people_ask_for_are_there():
    wanted = (
        "trl_first_release trl_1_16 ms_swift_2025_04 unsloth_gsm8k_notebook deepseekmath_grpo dr_grpo dapo gspo cispo"
    )
    wanted += " qwen3_thinking qwen3_non_thinking r1_distill"
    assert {path.stem for path in PRESETS} == set(wanted.split())


# Defaults of GRPOConfig in TRL 1.16.0 (`trl/trainer/grpo_config.py`) for names that both have; then those of its first
# release.
TRL_1_16 = dict(
    algorithm=dict(
        beta=0.0, num_iterations=1, epsilon=0.2, delta=None, epsilon_high=None, sapo_temperature_neg=1.05, sapo_temperature_pos=1.0,
        vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, importance_sampling_level="token",
        multi_objective_aggregation="sum_then_normalize", scale_rewards="group", loss_type="dapo", mask_truncated_completions=False,
        sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512, top_entropy_quantile=1.0, entropy_coef=0.0,
        use_adaptive_entropy=False, entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005, entropy_target=0.2,
        off_policy_mask_threshold=None, use_bias_correction_kl=True, importance_correction="sequence_mask", importance_correction_max=3.0,
        importance_correction_min=None,
    ),
    rollout=dict(num_generations=8, max_completion_length=512, temperature=1.0, top_p=1.0),
    train=dict(learning_rate=1e-6, max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.999, lr_scheduler_type="linear", warmup_steps=0),
)  # fmt: skip
TRL_FIRST = dict(
    algorithm=dict(
        beta=0.04, loss_type="grpo", num_iterations=1, use_bias_correction_kl=False, importance_correction="off"
    ),
    rollout=dict(num_generations=8, max_completion_length=256, temperature=0.9),
    train=dict(learning_rate=1e-6, max_grad_norm=1.0, weight_decay=0.0, adam_beta2=0.999)
    | dict(lr_scheduler_type="linear", warmup_steps=0),
)
SWIFT = dict(
    algorithm=dict(beta=0.04, epsilon=0.2, epsilon_high=None, num_iterations=1),
    rollout=dict(num_generations=8, max_completion_length=512, temperature=0.9, top_k=50, top_p=0.9),
)


@pytest.mark.parametrize(
    ("name", "defaults"), [("trl_1_16", TRL_1_16), ("trl_first_release", TRL_FIRST), ("ms_swift_2025_04", SWIFT)]
)
def test_a_preset_of_a_trainer_holds_its_defaults(name, defaults, tmp_path):
    config = load(name, tmp_path)
    for section, values in defaults.items():
        assert {key: getattr(getattr(config, section), key) for key in values} == values


def test_the_notebook_brings_model_data_and_rewards_along(tmp_path):
    config = load_config(PRESETS[0].parent / "unsloth_gsm8k_notebook.yaml")
    assert config.rewards.names == ["xmlcount", "soft_format", "strict_format", "int", "correctness"]
    assert config.data.train.source == "openai/gsm8k" and config.data.system_prompt.startswith(
        "\nRespond in the following format:"
    )
    assert (config.lora.rank, config.lora.alpha) == (32, 32)


@for_each("path", PRESETS)
def test_a_preset_names_only_what_it_is_about(path):
    sections = yaml.safe_load(path.read_text()).keys()
    assert "parallel" not in sections and "run" not in sections


# (preset, a template with the end of the models' public ones, end of the rendered prompt, a response that is right and
# well-formed)
THINKING = [
    ("qwen3_thinking", QWEN3, "<|im_start|>assistant\n", "<think>\nIt is 3.\n</think>\n\nThe answer is \\boxed{3}."),
    (
        "qwen3_thinking",
        QWEN3_THINKING,
        "<|im_start|>assistant\n<think>\n",
        "It is 3.\n</think>\n\nThe answer is \\boxed{3}.",
    ),
    ("qwen3_non_thinking", QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "The answer is \\boxed{3}."),
    ("r1_distill", R1, "<｜Assistant｜><think>\n", "It is 3.\n</think>\n\nThe answer is \\boxed{3}."),
]


@pytest.mark.parametrize(("name", "template", "end", "response"), THINKING)
def test_a_preset_of_a_thinking_model_renders_its_prompt_and_scores_its_response(
    name,
    template,
    end,
    response,
    chat_folder,  # noqa: F811
    tmp_path,
):
    load_tokenizer(chat_folder).tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 3?", "answer": "3"}\n')
    mine = (
        f"defaults: {PRESETS[0].parent / name}.yaml\nmodel: {{path: {tmp_path}}}\ndata: {{train: {{source: "
        f"{tmp_path}/rows.jsonl}}}}\n"
    )
    (tmp_path / "mine.yaml").write_text(mine)
    config = load_config(tmp_path / "mine.yaml")
    tokenizer = tokenizer_of(config, tmp_path)
    (prompt,) = PromptSource(config.data.train, config.data, tokenizer, config.rollout.max_prompt_length, 0).all()
    assert tokenizer.decode(prompt.token_ids, special=True).endswith(end)
    with RewardScorer(config.rewards.model_copy(update={"workers": 1}), config.rollout.max_completion_length) as scorer:
        (scored,) = scorer.score([Rollout(prompt, (1,), (0.0,), "stop", 0, response)])
    assert scored.reward == pytest.approx(sum(f.weight for f in config.rewards.functions))


@pytest.mark.parametrize("name", ["qwen3_thinking", "qwen3_non_thinking", "r1_distill"])
def test_a_preset_of_a_thinking_model_fits_its_model(name, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"defaults: {PRESETS[0].parent / name}.yaml\n{OWN}")
    config = load_config(
        tmp_path / "mine.yaml", ["model.path=Qwen/Qwen3-0.6B", "evaluation.steps=1", "data.eval.source=a.jsonl"]
    )
    assert plan(config, 8, has_data=False, fetch=False).problems == []
    assert (config.rollout.temperature, config.rollout.truncates) == (1.0, False) and config.evaluation.temperature in (
        0.6,
        0.7,
    )
