"""Writes docs/config/SECTION.md, the index of their groups in docs/config.md, and configs/schema.json: python
docs/config_table.py"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from megagrpo.config import RunConfig, render_help
from megagrpo.config.json_schema import schema_text

PAGE = Path(__file__).with_name("config.md")
FOLDER = Path(__file__).with_name("config")
SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"
BEGIN, END = "<!-- the index of keys begins -->", "<!-- the index of keys ends -->"
_KEY = re.compile(r"  (\S+)  \((.*), (?:default (.*)|(required))\)")
_PARENT = re.compile(r"(\w+(?:\.\w+)+):  (.*)")  # a key with keys below it
FIRST = "Most often set"

# The groups of each section's page in order, the keys that most people set first. A pattern may end in `*`. A key
# belongs to the first group with a pattern that it matches.
GROUPS: dict[str, dict[str, str]] = {
    "run": {
        FIRST: "name output_dir max_steps num_train_epochs save_steps save_total_limit resume trackers seed",
        "Saving and ending": "async_save overwrite time_limit callbacks nodes deterministic",
        "Console and files": "log_* keep_rollouts_gb progress peak_tflops",
        "Trackers": "wandb* trackio*",
        "Profiles": "profile*",
    },
    "model": {
        FIRST: "path tokenizer precision recompute",
        "Memory": "recompute_modules offload_activations base_storage fusions",
        "Reference and images": "reference_path freeze_vision_tower",
        "FP8": "fp8_* bf16_layers",
    },
    "lora": {FIRST: "rank alpha target_modules", "More": "*"},
    "parallel": {FIRST: "tp pp cp ep sequence_parallel", "More": "*"},
    "algorithm": {
        FIRST: "loss_type beta epsilon epsilon_high num_iterations steps_per_generation scale_rewards "
        "dynamic_sample mask_truncated_completions",
        "KL and reference": "kl_* use_bias_correction_kl sync_ref_model ref_model_*",
        "Teachers": "teacher*",
        "Loss": "loss_args loss_average loss_share_of_tasks delta importance_sampling_level top_entropy_quantile "
        "skip_zero_advantage",
        "Trainer-vLLM mismatch and stale responses": "importance_correction* off_policy_mask_threshold",
        "Critic": "critic*",
        "Advantages": "advantage_* multi_objective_aggregation turn_* token_*",
        "Dynamic sampling": "max_resample_times dynamic_sample_fallback",
        "Entropy bonus": "*entropy*",
        "Mixtures of experts": "router_* moe_*",
        "Parameters of single losses": "sapo_* vespo_* fipo_*",
    },
    "data": {
        FIRST: "train train.source train.split train.subset prompt_column columns system_prompt chat_template eval",
        "Train and evaluation data": "train* eval*",
        "Prompts": "extract_hash_answer images chat_template_kwargs sampling_column shuffle overlong_prompts bad_rows",
        "Curriculum and your own source": "source source_args curriculum*",
    },
    "rewards": {
        FIRST: "functions functions.N.function functions.N.weight functions.N.args functions.N.name timeout",
        "Calls": "functions* workers concurrency",
    },
    "rollout": {
        FIRST: "prompts_per_step num_generations max_prompt_length max_completion_length temperature placement "
        "servers tp gpu_memory_utilization",
        "Sampling": "top_p top_k min_p stop include_stop_str_in_output *thinking* logit_bias "
        "allowed_token_ids *_penalty structured_outputs",
        "Generation ahead of training": "max_staleness in_flight scheduling straggler_seconds",
        "Agreement with the trainer": "mismatch_threshold routing_replay",
        "Engine and KV cache": "kv_cache_gb max_num_seqs enforce_eager quantization extra_args",
        "Layout of a server": "pp dp nodes_per_server enable_expert_parallel",
        "Kept rollouts": "kept*",
        "Servers of your own": "urls urls_file reconnect_timeout token_file interface port",
        "Weight sync": "weight_sync_*",
        "Time limits and restarts": "startup_timeout request_timeout max_restarts",
    },
    "train": {
        FIRST: "learning_rate max_tokens_per_micro_batch optimizer lr_scheduler_type warmup_steps max_grad_norm",
        "Optimizer": "optimizer_args warmup_ratio min_learning_rate weight_decay adam_* muon_* max_skipped_steps",
        "Memory": "optimizer_state_dtype optimizer_offload offload distributed_optimizer",
        "Log-probs and shared prompts": "share_prompts logprob_chunk fused_logprobs logprobs_fp8_recipe",
        "Communication and routers": "overlap* ddp_bucket_size freeze_moe_router",
    },
    "multi_turn": {
        FIRST: "tools environment scheduler agent max_turns tool_parser",
        "Where user code runs": "environment_args scheduler_args reuse_environments container python workers timeout",
        "Limits": "*",
    },
    "evaluation": {
        FIRST: "steps num_generations temperature keep_best",
        "All sets": "top_p top_k min_p pass_function pass_reward answer",
        "Further sets": "sets*",
    },
    "tasks": {FIRST: "tasks N.*"},
    "debug": {FIRST: "*"},
}


def group_of(section: str, key: str) -> str:
    """The name of the group that a key belongs to."""
    name = key.removeprefix(f"{section}.")
    groups = GROUPS[section].items()
    if found := next((group for group, patterns in groups if any(fnmatch(name, p) for p in patterns.split())), None):
        return found
    raise KeyError(f"{key} is in no group of docs/config_table.py")


def entries(section: str) -> dict[str, list[str]]:
    """The lines of each key of `megagrpo keys SECTION`, below its heading; by key, in the order of the page."""
    found: dict[str, list[str]] = {}
    for line in render_help(section).splitlines():
        if match := _KEY.fullmatch(line):
            key, type_name, default, required = match.groups()
            values = type_name.replace(" and <= 1e+08", "").replace(" and <=", " to")
            if empty := default == "empty":
                values = values.removesuffix(" | empty")
            shown = "" if empty else f"; {required or f'default `{default}`'}"
            found[key] = ["", f"{re.sub(r' \| (?=str$)', ' or ', values).replace(' | ', ', ')}{shown}", ""]
        elif parent := _PARENT.fullmatch(line):
            found[key := parent[1]] = ["", parent[2]]
        elif line.startswith("      "):
            found[key].append(re.sub(r"docs/(\w+\.md)", r"[\1](../\1)", line.strip()))
    names = [*GROUPS[section]]
    listed = GROUPS[section][FIRST].split()

    def position(key: str) -> tuple[int, int]:
        """Groups in their order; in the first group the keys as listed, in the others as the schema has them."""
        group, name = group_of(section, key), key.removeprefix(f"{section}.")
        return names.index(group), listed.index(name) if group == FIRST and name in listed else 0

    return {key: found[key] for key in sorted(found, key=position)}


def section_page(section: str) -> str:
    """`megagrpo keys SECTION` as a page with a heading per key, so that every key has an anchor and is found by its
    name."""
    lines = [f"# Keys of `{section}`", "", "[All sections](../config.md#every-key)"]
    shown = None
    for key, text in entries(section).items():
        if (group := group_of(section, key)) != shown:
            lines += ["", f"## {(shown := group)}"]
        lines += ["", f"### `{key}`", *text]
    return "\n".join(lines) + "\n"


def group_links(section: str, page: str) -> list[str]:
    """A link to each group of a section's page."""
    return [f"[{group}]({page}#{re.sub(r'[^\w -]', '', group.lower()).replace(' ', '-')})" for group in GROUPS[section]]


def index() -> str:
    """The groups of all sections after the first one, each a link to its heading."""
    rows = ["| section | further groups of keys |", "|---|---|"]
    for section in RunConfig.model_fields:
        page = f"config/{section}.md"
        rows.append(f"| [`{section}`]({page}) | {', '.join(group_links(section, page)[1:])} |")
    return "\n".join(rows)


def with_index(page: str) -> str:
    """The page with the text between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{index()}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """The text of every generated page."""
    return {FOLDER / f"{section}.md": section_page(section) for section in RunConfig.model_fields} | {
        PAGE: with_index(PAGE.read_text())
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    SCHEMA.write_text(schema_text(), encoding="utf-8")
