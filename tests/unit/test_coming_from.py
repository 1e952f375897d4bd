"""Whoever comes from another trainer finds every argument of it."""

import re
from pathlib import Path

import pytest

from megagrpo.config import RunConfig, load_config
from megagrpo.config_io import fields

DOCS = Path(__file__).parents[2] / "docs"
KEYS = {key for key, _ in fields(RunConfig)}

# The fields that TRL 1.16.0's GRPOConfig adds to transformers' TrainingArguments.
TRL = """model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations num_generations_eval
    max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation
    temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm
    vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
    vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
    scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
    log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    vllm_importance_sampling_cap""".split()

# The arguments that ms-swift's GRPO page named in April 2025 (commit 526f8a409), then those of its recipe for DAPO.
SWIFT = """num_generations max_completion_length ds3_gather_for_generation reward_funcs reward_weights reward_model reward_model_plugin
    log_completions use_vllm vllm_device vllm_gpu_memory_utilization vllm_max_model_len vllm_max_num_seqs vllm_enforce_eager
    vllm_limit_mm_per_prompt vllm_enable_prefix_caching vllm_server_host vllm_server_port vllm_server_timeout num_infer_workers
    num_iterations epsilon epsilon_high async_generate sleep_level move_model_batches offload_optimizer offload_model
    gc_collect_after_offload multi_turn_func mini_batch_size dynamic_sample max_resample_times overlong_filter
    tensor_parallel_size temperature top_k top_p repetition_penalty system external_plugins beta cosine_min_len_value_wrong
    cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct cosine_max_len repetition_n_grams
    repetition_max_penalty soft_max_length soft_cache_length train_type lora_rank lora_alpha target_modules torch_dtype max_length
    truncation_strategy warmup_ratio eval_steps save_steps save_total_limit logging_steps report_to lmdeploy_device""".split()


def table(page: str) -> list[tuple[list[str], str]]:
    """The rows of the first table of a page: the names in its first cell, its second cell."""
    rows = []
    for line in (DOCS / page).read_text().split("## Arguments")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            first, second = re.split(r" \| ", line.strip("| "), maxsplit=1)
            rows.append((re.findall(r"`([\w.]+)`", first), second))
    return rows


@pytest.mark.parametrize(("page", "names"), [("coming_from_trl.md", TRL), ("coming_from_ms_swift.md", SWIFT)])
def test_every_argument_has_a_row(page, names):
    found = [name for row, _ in table(page) for name in row]
    assert set(names) <= set(found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("page", ["coming_from_trl.md", "coming_from_ms_swift.md"])
def test_what_a_row_leads_to_exists(page):
    sections = "|".join(RunConfig.model_fields)
    for names, text in table(page):
        same = re.search(rf"the same under `({sections})\.`", text)
        keys = [f"{same[1]}.{name}" for name in names] if same else re.findall(rf"`((?:{sections})\.[\w.]+)`", text)
        assert set(keys) <= KEYS, names


def keys_of(names: list[str], text: str) -> list[str]:
    """The keys that a row names."""
    sections = "|".join(RunConfig.model_fields)
    same = re.search(rf"the same under `({sections})\.`", text)
    return [f"{same[1]}.{name}" for name in names] if same else re.findall(rf"`((?:{sections})\.[\w.]+)", text)


@pytest.mark.parametrize("page", ["coming_from_trl.md", "coming_from_ms_swift.md"])
def test_every_key_that_a_row_names_is_set_by_a_test_of_what_it_does(page):
    pages = {"test_coming_from.py", "test_docs.py", "test_presets.py"}
    tests = "\n".join(path.read_text() for path in DOCS.parent.glob("tests/*/*.py") if path.name not in pages)
    for names, text in table(page):
        for key in keys_of(names, text):
            leaf = key.rpartition(".")[2]
            assert re.search(rf"\b{re.escape(key)}\b|\b{leaf}[=:]|[\"']{leaf}[\"']|\.{leaf}\b", tests), (names, key)


@pytest.mark.parametrize("page", ["coming_from_trl.md", "coming_from_ms_swift.md"])
def test_what_a_row_calls_not_there_is_no_key(page):
    leaves = {key.rpartition(".")[2] for key in KEYS}
    missing = [name for names, text in table(page) if text.startswith("not there") for name in names]
    assert "repetition_penalty" in missing and not leaves & set(missing)


@pytest.mark.parametrize("page", ["coming_from_trl.md", "coming_from_ms_swift.md"])
def test_arguments_for_vllm_that_a_row_gives_are_accepted(page):
    given = [match for _, text in table(page) for match in re.findall(r"`rollout\.extra_args: \[([^\]]*)\]`", text)]
    assert given
    for words in given:
        load_config(DOCS.parent / "configs" / "quickstart.yaml", [f"rollout.extra_args=[{words.replace('...', 'auto')}]"])


def test_the_row_of_async_generate_is_a_config_that_loads():
    (text,) = (text for names, text in table("coming_from_ms_swift.md") if "async_generate" in names)
    settings = [pair.replace(": ", "=") for pair in re.findall(r"`(rollout\.\w+: \w+)`", text)]
    assert load_config(
        DOCS.parent / "configs" / "quickstart.yaml", [*settings, "algorithm.importance_correction=token_truncate"]
    ).rollout.max_staleness == 1
