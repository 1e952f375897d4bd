"""The migration pages list every argument of the other trainers."""

import ast
import functools
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from megagrpo.config import RunConfig, load_config
from megagrpo.config.key_table import fields
from tests.unit.for_each import for_each

DOCS, TESTS = Path(__file__).parents[2] / "docs", Path(__file__).parents[1]
PAGES = tuple(sorted(path.name for path in DOCS.glob("coming_from_*.md")))
KEYS = {key for key, _ in fields(RunConfig)}
SECTIONS = "|".join(RunConfig.model_fields)
SMALLEST = "model: {path: m}\ndata: {train: {source: a.jsonl}}\nrewards: {functions: [{function: exact_number}]}\n"
ARGS = "rewards.functions.N.args"
WITHOUT_KL = [f"coming_from_{name}.md" for name in ("trl", "slime", "prime_rl", "areal")]  # as their recipes
# a row without a counterpart, with its reason
NO = re.compile(r"no: .+|(?:no|not there), (?:not yet(?:: .+)?|use .+)")
SHOWN_BY, SAYS, DIFFERS = yaml.safe_load((TESTS / "data" / "shown_by.yaml").read_text()).values()


def table(page: str) -> list[tuple[list[str], str]]:
    """The rows of the first table of a page: the names in its first cell, its second cell."""
    rows = []
    for line in (DOCS / page).read_text().split("## Arguments")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            first, second = re.split(r" \| ", line.strip("| "), maxsplit=1)
            rows.append((re.findall(r"`(?:--)?([\w.-]+(?:\.\*)?)`", first), second))
    return rows


def arguments(page: str) -> set[str]:
    """The arguments of the trainer of a page."""
    text = re.sub("^#.*\n", "", (TESTS / "data" / "peer_arguments.txt").read_text(), flags=re.MULTILINE)
    return set(text.split(f"{page}:")[1].split("coming_from_")[0].split())


@for_each("page", PAGES)
def test_every_argument_has_a_row(page):
    """The pages of TRL and ms-swift also list arguments of transformers and of other pages; the others list the
    arguments of one version only."""
    found = [name for row, _ in table(page) for name in row]
    assert arguments(page) <= set(found) and len(found) == len(set(found))
    if page not in ("coming_from_trl.md", "coming_from_ms_swift.md"):
        assert arguments(page) == set(found)


def keys_of(names: list[str], text: str) -> list[str]:
    """The keys that a row names."""
    same = re.search(rf"the same under `({SECTIONS})\.`", text)
    return (
        [f"{same[1]}.{name.rpartition('.')[2]}" for name in names]
        if same
        else re.findall(rf"`((?:{SECTIONS})\.[\w.]+)", text)
    )


def says_more(text: str) -> bool:
    """Whether the second cell of a row contains more than key names, links, and a note that the argument is missing,
    and why."""
    if NO.fullmatch(text):
        return False
    links = r"\(\[[^]]*\]\([^)]*\)\)"
    keys = rf"the same under `(?:{SECTIONS})\.`|`(?:{SECTIONS})\.[\w.]+`"
    rest = re.sub(rf"{links}|{keys}|^not there", "", text)
    return re.sub(r"\band\b|[+,]", "", rest).strip() != ""


def differences(page: str) -> list[tuple[str, str]]:
    """The rows of the table of differences: first cell, the others."""
    section = (DOCS / page).read_text().split("## What differs on purpose")[1]
    rows = [line.strip("| ").split(" | ", maxsplit=1) for line in section.splitlines() if line.startswith("| ")]
    return [(first, rest) for first, rest in rows[1:]]


def each_of(entry: str | list[str]) -> list[str]:
    return [entry] if isinstance(entry, str) else entry


@functools.cache
def definitions(file: str) -> dict[str, str]:
    """The source of each definition in a test file, by name: functions with their decorators, classes, and assigned
    names."""
    text = (TESTS / file).read_text()
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        source = "\n".join(
            [ast.unparse(d) for d in getattr(node, "decorator_list", [])] + [ast.get_source_segment(text, node)]
        )
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
        wanted += {word for word in re.findall(r"\w+", known[name]) if word in known and word not in taken} - set(
            wanted
        )
    return "\n".join(taken.values())


@pytest.mark.parametrize("page", PAGES)
def test_a_row_without_a_counterpart_has_a_reason(page):
    assert [names for names, text in table(page) if text in ("no", "not there", "not yet")] == []
    assert [
        text
        for _, text in table(page)
        if re.match(r"(no|not there), ", text) and not re.match(r"not there, but for", text) and not NO.fullmatch(text)
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_row_leads_to_exists(page):
    for names, text in table(page):
        assert {key for key in keys_of(names, text) if key != ARGS} <= KEYS, names


def test_the_table_of_tests_is_that_of_the_rows():
    named = {
        key for page in PAGES for names, text in table(page) if not NO.fullmatch(text) for key in keys_of(names, text)
    }
    named |= {key for page in PAGES for row in differences(page) for key in keys_of([], " ".join(row))}
    assert SHOWN_BY.keys() == named
    assert SAYS == {page: {n[0]: SAYS[page].get(n[0]) for n, text in table(page) if says_more(text)} for page in PAGES}
    assert {page: set(rows) for page, rows in DIFFERS.items()} == {
        page: {row[0] for row in differences(page)} for page in PAGES
    }


def test_every_test_of_the_table_exists():
    entries = [*SHOWN_BY.values()]
    entries += [entry for rows in (*SAYS.values(), *DIFFERS.values()) for entry in rows.values()]
    for test in {test for entry in entries for test in each_of(entry)}:
        file, name = test.split("::")
        assert name.startswith("test_") and f"def {name}(" in definitions(file)[name], test


def test_a_test_of_a_key_sets_or_reads_it():
    """A name counts in full in a string; its last part counts as a keyword, as a mapping's key, or as an attribute."""
    missing = []
    for key, entry in SHOWN_BY.items():
        leaf = "args" if key == ARGS else key.rpartition(".")[2]
        shown = re.compile(rf"\b{re.escape(key)}\b|\b{leaf}\s?[=:]|[\"']{leaf}[\"']|\.{leaf}\b")
        missing += [(key, test) for test in each_of(entry) if not shown.search(source_of(test))]
    assert len(SHOWN_BY) > 100 and missing == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_row_calls_not_there_is_no_key(page):
    leaves = {key.rpartition(".")[2] for key in KEYS}
    missing = [name.rpartition(".")[2] for names, text in table(page) if text.startswith("not there") for name in names]
    assert ("generation_kwargs" in missing) == (page == "coming_from_trl.md")
    assert not leaves & set(missing)


@pytest.mark.parametrize("page", PAGES)
def test_arguments_for_vllm_that_a_row_gives_are_accepted(page):
    given = [
        (match, text) for _, text in table(page) for match in re.findall(r"`rollout\.extra_args: \[([^\]]*)\]`", text)
    ]
    assert given
    for words, text in given:
        overrides = [f"rollout.extra_args=[{words.replace('...', 'auto')}]"]
        overrides += ["algorithm.importance_correction=token_truncate"] * (
            "with `algorithm.importance_correction`" in text
        )
        load_config(DOCS.parent / "configs" / "quickstart.yaml", overrides)


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


def run_file(page: str, module: str, **names: object) -> dict[str, object]:
    """The names that the page's Python file defines, with `module` importable and `names` in it."""
    (text,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    theirs = types.ModuleType(module)
    vars(theirs).update(names)
    sys.modules[module] = theirs
    try:
        defined: dict[str, object] = {}
        exec(text, defined)
        return defined
    finally:
        del sys.modules[module]


def test_the_reward_file_of_verl_calls_a_reward_function_of_verl():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(data_source == "sums" and ground_truth in solution_str) + extra_info["bonus"]

    score = run_file("coming_from_verl.md", "my_reward", compute_score=compute_score)["score"]
    completions = [[{"role": "assistant", "content": text}] for text in ("it is 4", "it is 5")]
    columns = {
        "data_source": ["sums"] * 2,
        "reward_model": [{"ground_truth": "4"}] * 2,
        "extra_info": [{"bonus": 0.5}] * 2,
    }
    assert score(completions=completions, prompts=["?", "?"], **columns) == [1.5, 0.5]


def test_the_reward_file_of_openrlhf_calls_a_reward_function_of_openrlhf():
    def reward_func(queries, prompts, labels):
        return {"rewards": [float(q == p + label) for q, p, label in zip(queries, prompts, labels, strict=True)]}

    score = run_file("coming_from_openrlhf.md", "my_reward", reward_func=reward_func)["score"]
    assert score(prompts=["2+2=", "2+3="], completions=["4", "4"], label=["4", "5"], other=[1, 2]) == [1.0, 0.0]


@pytest.mark.parametrize("page", PAGES)
def test_the_yaml_of_a_page_is_a_config(page, tmp_path):
    """Only files and names of the reader are missing: a reward file, data, a model."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "run.yaml").write_text(text)
    for name in ("my_rewards.py", "verl_reward.py", "openrlhf_reward.py"):
        (tmp_path / name).touch()
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm.beta > 0 or page in WITHOUT_KL
