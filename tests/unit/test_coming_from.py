"""The migration pages list every argument of the other trainers."""

import ast
import functools
import re
from pathlib import Path

import pytest

from megagrpo.config import RunConfig, load_config
from megagrpo.config.io import fields
from tests.unit import shown_by

DOCS, TESTS = Path(__file__).parents[2] / "docs", Path(__file__).parents[1]
PAGES = ("coming_from_trl.md", "coming_from_ms_swift.md")
KEYS = {key for key, _ in fields(RunConfig)}
SECTIONS = "|".join(RunConfig.model_fields)
SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
ARGS = "rewards.functions.N.args"

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

# The arguments on ms-swift's GRPO page of April 2025 (commit 526f8a409), then those of its recipe for DAPO.
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


def keys_of(names: list[str], text: str) -> list[str]:
    """The keys that a row names."""
    same = re.search(rf"the same under `({SECTIONS})\.`", text)
    return [f"{same[1]}.{name}" for name in names] if same else re.findall(rf"`((?:{SECTIONS})\.[\w.]+)", text)


def says_more(text: str) -> bool:
    """Whether the second cell of a row contains more than key names, links, and a note that the argument is missing."""
    links = r"\(\[[^]]*\]\([^)]*\)\)"
    keys = rf"the same under `(?:{SECTIONS})\.`|`(?:{SECTIONS})\.[\w.]+`"
    rest = re.sub(rf"{links}|{keys}|^not there|^no$", "", text)
    return re.sub(r"\band\b|[+,]", "", rest).strip() != ""


def differences(page: str) -> list[tuple[str, str]]:
    """The rows of the table of differences: first cell, the others."""
    section = (DOCS / page).read_text().split("## What differs on purpose")[1]
    rows = [line.strip("| ").split(" | ", maxsplit=1) for line in section.splitlines() if line.startswith("| ")]
    return [(first, rest) for first, rest in rows[1:]]


def each_of(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


@functools.cache
def definitions(file: str) -> dict[str, str]:
    """The source of each definition in a test file, by name: functions with their decorators, classes, and assigned names."""
    text = (TESTS / file).read_text()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        source = "\n".join([ast.unparse(d) for d in getattr(node, "decorator_list", [])] + [ast.get_source_segment(text, node)])
        named = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for name in named or [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]:
            found[name] = found.get(name, "") + source
    return found


def source_of(test: str) -> str:
    """The source of a test with everything that it uses from its own file: constants, helpers, fixtures."""
    file, name = test.split("::")
    known, wanted, taken = definitions(file), [name], {}
    while wanted:
        name = wanted.pop()
        taken[name] = known[name]
        wanted += {word for word in re.findall(r"\w+", known[name]) if word in known and word not in taken} - set(wanted)
    return "\n".join(taken.values())


@pytest.mark.parametrize("page", PAGES)
def test_what_a_row_leads_to_exists(page):
    for names, text in table(page):
        assert {key for key in keys_of(names, text) if key != ARGS} <= KEYS, names


def test_the_table_of_tests_is_that_of_the_rows():
    named = {key for page in PAGES for names, text in table(page) for key in keys_of(names, text)}
    named |= {key for page in PAGES for row in differences(page) for key in keys_of([], " ".join(row))}
    assert shown_by.KEYS.keys() == named
    assert shown_by.SAYS == {page: {n[0]: shown_by.SAYS[page].get(n[0]) for n, text in table(page) if says_more(text)} for page in PAGES}
    assert {page: set(rows) for page, rows in shown_by.DIFFERS.items()} == {page: {row[0] for row in differences(page)} for page in PAGES}


def test_every_test_of_the_table_exists():
    entries = [*shown_by.KEYS.values()]
    entries += [entry for rows in (*shown_by.SAYS.values(), *shown_by.DIFFERS.values()) for entry in rows.values()]
    for test in {test for entry in entries for test in each_of(entry)}:
        file, name = test.split("::")
        assert name.startswith("test_") and f"def {name}(" in definitions(file)[name], test


@pytest.mark.parametrize("key", shown_by.KEYS)
def test_a_test_of_a_key_sets_or_reads_it(key):
    """A name counts in full in a string; its last part counts as a keyword, as a mapping's key, or as an attribute."""
    leaf = "args" if key == ARGS else key.rpartition(".")[2]
    for test in each_of(shown_by.KEYS[key]):
        found = re.search(rf"\b{re.escape(key)}\b|\b{leaf}\s?[=:]|[\"']{leaf}[\"']|\.{leaf}\b", source_of(test))
        assert found, test


@pytest.mark.parametrize("page", PAGES)
def test_what_a_row_calls_not_there_is_no_key(page):
    leaves = {key.rpartition(".")[2] for key in KEYS}
    missing = [name for names, text in table(page) if text.startswith("not there") for name in names]
    assert "repetition_penalty" in missing and not leaves & set(missing)


@pytest.mark.parametrize("page", PAGES)
def test_arguments_for_vllm_that_a_row_gives_are_accepted(page):
    given = [match for _, text in table(page) for match in re.findall(r"`rollout\.extra_args: \[([^\]]*)\]`", text)]
    assert given
    for words in given:
        load_config(DOCS.parent / "configs" / "quickstart.yaml", [f"rollout.extra_args=[{words.replace('...', 'auto')}]"])


def test_the_row_of_async_generate_is_a_config_that_loads():
    (text,) = (text for names, text in table("coming_from_ms_swift.md") if "async_generate" in names)
    settings = [pair.replace(": ", "=") for pair in re.findall(r"`(rollout\.\w+: \w+)`", text)]
    assert (
        load_config(
            DOCS.parent / "configs" / "quickstart.yaml", [*settings, "algorithm.importance_correction=token_truncate"]
        ).rollout.max_staleness
        == 1
    )


def test_bias_correction_is_off_here_and_on_in_the_preset_of_trl(tmp_path):
    presets = DOCS.parent / "configs" / "presets"
    (tmp_path / "mine.yaml").write_text(f"defaults: {presets}/trl_1_16.yaml\n{SMALLEST}")
    assert load_config(tmp_path / "mine.yaml").algorithm.use_bias_correction_kl
    (tmp_path / "mine.yaml").write_text(SMALLEST)
    assert not load_config(tmp_path / "mine.yaml").algorithm.use_bias_correction_kl
