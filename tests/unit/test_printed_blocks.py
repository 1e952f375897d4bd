"""Every block of the docs that shows output is listed here with its check. An example that no longer fits the code or
its config fails."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.records.console import EVALUATION_COLUMNS, STEP_COLUMNS
from megagrpo.trainer.evaluation.offline import TABLE_METRICS, table
from megagrpo.trainer.evaluation.sets import steps_to
from tests.unit.test_docs import PAGES, REPOSITORY, source_texts

EXAMPLES = sorted((REPOSITORY / "configs" / "examples").glob("*/README.md"))
QUICKSTART = "configs/quickstart.yaml"
COLUMNS = {label: form for label, _, form in (*STEP_COLUMNS, *EVALUATION_COLUMNS) if label}
HEADS = "set          reward    length       cut    pass@1"
VARIES = r"\d+ MB/s|\d+ s$|(?<=  )\d+\.\d$"  # speeds and times of a line

# (page, beginning of the block) -> its check, and the arguments of the check
PRINTED = {
    ("README", "quickstart: package:"): ("log", QUICKSTART),
    ("your_own_task", "step 1/6"): ("log", "configs/examples/capitals/run.yaml"),
    ("async/README", "evaluation after step 0"): ("log", "configs/examples/async/run.yaml"),
    ("lora/README", "evaluation after step 0"): ("log", "configs/examples/lora/run.yaml"),
    ("math/README", "evaluation after step 0"): ("log", "configs/examples/math/run.yaml"),
    ("evaluation", HEADS + "\n"): ("table", "megagrpo eval (?=megagrpo:quickstart --)"),
    ("evaluation", HEADS + "    pass@2"): ("table", "megagrpo eval (?=megagrpo:quickstart evaluation)"),
    ("audit", "$ megagrpo audit "): ("audit", "megagrpo train "),
    ("commands", "$ megagrpo check "): ("output",),
    ("convert", "$ megagrpo convert "): ("output",),
    ("convert", "$ megagrpo roundtrip "): ("output",),
    ("checkpoints", "run.name: runs/capitals is in use"): ("messages",),
    ("checkpoints", "capitals_hf: rounded"): ("messages",),
    ("report", "runs/quickstart/report.html"): ("messages",),
    ("weight_sync", "weight sync: shared_memory (single host)"): ("messages",),
    ("fp8", "weight sync: shared_memory (single host); vLLM"): ("messages",),
    ("servers", "warning: vLLM server http://127.0.0.1:41235"): ("messages",),
    ("servers", "warning: a vLLM server died"): ("messages",),
    ("servers", "warning: vLLM server http://127.0.0.1:35917"): ("messages",),
    ("servers", "warning: vLLM server http://10.0.0.7"): ("messages",),
    ("servers", "vLLM server http://10.0.0.8"): ("messages",),
    ("weight_sync", "sync      8 rank(s)"): ("labels",),
    ("commands", "$ megagrpo doctor "): ("labels",),  # of one machine
    ("environment", "$ RANK=0 VLLM_API_KEY=secret megagrpo doctor"): ("labels",),
    ("verify", "$ megagrpo verify megagrpo:quickstart_tp3"): ("labels",),  # minutes
    ("losses", "$ python benchmarks/learning.py"): ("benchmark",),
    # No output of a command of megagrpo, or of a model or a file that a reader does not have.
    ("add_a_model", "$ python checkpoints_tools/new_family.py "): (
        "other",
    ),  # of a config.json on the hub; test_new_family drafts others
    ("add_a_model", "$ python -m tests.prove_family "): ("other",),  # minutes; the full suite runs the proofs
    ("checkpoints", "runs/capitals/checkpoints/step_000006/"): ("other",),
    ("how_it_works", "            YAML"): ("other",),
    ("weight_sync", " trainer rank 0"): ("other",),
    ("calculator_tool/README", "<tool_call>"): ("other",),
}


def name_of(page: Path) -> str:
    return page.stem if page.parent in (REPOSITORY, REPOSITORY / "docs") else f"{page.parent.name}/{page.stem}"


@cache
def printed_blocks() -> list[tuple[str, str]]:
    """(page, text) of every block that shows output; `test_docs.py` runs the plans."""
    found = []
    for page in [*PAGES, *EXAMPLES]:
        fenced = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        shown = [(kind, text) for kind, text in fenced if kind in ("", "console")]
        found += [(name_of(page), text) for kind, text in shown if not (kind and text.startswith("$ megagrpo plan "))]
    return found


def blocks_of(check: str) -> list:
    """The test's parameters of every block with this check: its text and the arguments."""
    chosen = [(key, arguments) for key, (name, *arguments) in PRINTED.items() if name == check]
    return [pytest.param(text_of(*key), *arguments, id=f"{key[0]}: {key[1][:20]}") for key, arguments in chosen]


def text_of(page: str, start: str) -> str:
    """The text of the block with the longest beginning in PRINTED."""
    (text,) = [text for name, text in printed_blocks() if (page, start) == key_of(name, text)]
    return text


def key_of(page: str, text: str) -> tuple[str, str] | None:
    return max(
        (key for key in PRINTED if key[0] == page and text.startswith(key[1])),
        key=lambda key: len(key[1]),
        default=None,
    )


def config_of(page: str, command: str):
    """The config of the first command on a page that begins with these words, with its overrides."""
    text = next(path for path in PAGES if name_of(path) == page).read_text().replace("\\\n", " ")
    words = shlex.split(re.search(rf"^{command}(.*)$", text, re.MULTILINE)[1])
    path = words[0].replace("megagrpo:", "configs/") + ".yaml" * words[0].startswith("megagrpo:")
    return load_config(REPOSITORY / path, [word for word in words[1:] if re.match(r"[\w.]+=", word)])


def test_every_block_of_output_has_a_check():
    keys = [key_of(page, text) for page, text in printed_blocks()]
    assert [block for block, key in zip(printed_blocks(), keys, strict=True) if key is None] == []
    assert set(keys) == set(PRINTED)


@pytest.mark.parametrize(("text", "path"), blocks_of("log"))
def test_a_recorded_log_fits_its_config(text, path):
    """Labels and formats are the console's; steps and lengths are possible in a run of this config."""
    config = load_config(REPOSITORY / path)
    for line in text.splitlines():
        if not (
            found := re.match(
                r"(step +(?P<step>\d+)/(?P<of>\d+)|evaluation after step (?P<after>\d+))(?P<cells>.*)", line
            )
        ):
            assert is_in_the_source(line), line
            continue
        assert (
            int(found["step"] or found["after"]) <= config.run.num_steps == int(found["of"] or config.run.num_steps)
        ), line
        for label, value in re.findall(r"  ([\w@/]+) +([-\d.]+%?)", found["cells"]):
            number = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
            assert COLUMNS[label].format(number).strip() == value, line
            assert label != "length" or number <= config.rollout.max_completion_length, line


@pytest.mark.parametrize(("text", "command"), blocks_of("table"))
def test_a_table_of_evaluations_fits_its_command(text, command):
    config = config_of("evaluation", command)
    metrics, n = metrics_of(text), config.evaluation.num_generations
    estimates = [f"pass@{k}" for k in steps_to(n)]
    assert [*metrics] == [*TABLE_METRICS, *estimates, *([f"maj@{n}"] if n > 1 else [])]
    assert table(metrics, [""]) == text.rstrip("\n")
    assert [metrics[name] for name in estimates] == sorted(metrics[name] for name in estimates)
    assert (
        metrics["reward"] == metrics["pass@1"]
        and metrics["completions/mean_length"] <= config.rollout.max_completion_length
    )


def metrics_of(text: str) -> dict[str, float]:
    """The metrics in a table of one set."""
    heads, values = (line.split() for line in text.splitlines())
    return dict(zip([*TABLE_METRICS, *heads[4:]], map(float, values[1:]), strict=True))


def test_the_finished_quickstart_evaluates_to_what_it_printed():
    metrics = metrics_of(text_of("evaluation", HEADS + "\n"))
    cells = "".join(f"  {label} {form.format(metrics[name])}" for label, name, form in EVALUATION_COLUMNS)
    last = re.findall(r"^evaluation after step [1-9]\d*(.*)$", text_of("README", "quickstart: package:"), re.MULTILINE)
    assert last == [cells]


@pytest.mark.parametrize(("text", "command"), blocks_of("audit"))
def test_an_audit_has_as_many_samples_and_tokens_as_its_run(text, command):
    rollout = config_of("audit", command).rollout
    samples, tokens = map(int, re.search(r"(\d+) samples, (\d+) response tokens", text).groups())
    assert (
        samples == rollout.prompts_per_step * rollout.num_generations
        and tokens <= samples * rollout.max_completion_length
    )
    assert {rows for name, rows in re.findall(r"^  (policy log-probs|entropy|masks) +(\d+)", text, re.MULTILINE)} == {
        str(tokens)
    }


@pytest.mark.full
@pytest.mark.parametrize("text", blocks_of("output"))
def test_a_command_prints_its_block(text, tmp_path, monkeypatch):
    """Speeds and times aside; `...` stands for any lines."""
    monkeypatch.chdir(REPOSITORY if "configs/" in text else tmp_path)
    expected, printed = [], []
    for part in re.split(r"^\$ megagrpo ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        expected.append(pattern_of(shown))
        printed.append(output_of(command))
    assert all(re.fullmatch(one, other, re.DOTALL) for one, other in zip(expected, printed, strict=True)), printed


def output_of(command: str) -> str:
    """What a command prints, each run of spaces as one space, without speeds and times. It runs in a process of its
    own."""
    words = [sys.executable, "-m", "megagrpo", *shlex.split(command)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    return plain(done.stdout.replace(f"{REPOSITORY}/", ""))


def plain(text: str) -> str:
    lines = [
        re.sub(VARIES, "#", line.rstrip()) for line in text.strip().splitlines() if not re.search(r": \d\d?% of ", line)
    ]
    return " ".join(" ".join(lines).split())


def pattern_of(shown: str) -> str:
    return re.escape(plain(shown)).replace(re.escape(" ... "), " .* ")


@pytest.mark.parametrize("text", blocks_of("messages"))
def test_a_message_has_the_words_of_the_source(text):
    for message in re.sub(r"\n {4}", " ", text).splitlines():
        assert is_in_the_source(message) or is_in_the_source(message.removeprefix("warning: ")), message


@pytest.mark.parametrize("text", blocks_of("labels"))
def test_the_labels_of_a_report_are_those_of_the_source(text):
    lines = [line for line in re.sub(r"\\\n", "", text).splitlines() if not line.startswith(("$", "..."))]
    labels = {re.split(r" {2,}", line.strip())[0] for line in lines}
    words = {word for label in labels if not label[:1].isdigit() for word in re.findall(r"[a-z]{4,}", label)}
    assert {word for word in words if word not in the_source()} == set()


@cache
def the_source() -> str:
    return source_texts()


@cache
def fragments() -> list[list[str]]:
    """The constant parts of each text of the source."""
    parts = [[part.strip() for part in text.split("…") if part.strip()] for text in the_source().splitlines()]
    return [text for text in parts if sum(map(len, text)) >= 5]


def is_in_the_source(line: str) -> bool:
    """Whether every word of the line is a constant of a source text whose other constants are in the line too. Values
    in messages have digits, slashes, underscores or capitals only. `...` ends a line early."""
    covered: set[int] = set()
    for parts in fragments():
        at, spans = 0, []
        for part in parts:
            at = line.find(part, at)
            if at < 0 and spans and line.endswith("..."):
                at = len(line)
            elif at < 0:
                break
            else:
                spans.append(range(at, at := at + len(part)))
        else:
            covered |= {index for span in spans for index in span}
    words = [
        word
        for word in re.finditer(r"\S+", line)
        if re.search("[a-z]", word[0]) and not re.search(r"[\d/_]|\.\.\.", word[0])
    ]
    return all(covered >= {index for index in range(*word.span()) if line[index].isalpha()} for word in words)


def test_the_figures_of_the_benchmark_have_the_columns_of_its_script():
    text, script = (
        text_of("losses", "$ python benchmarks/learning.py"),
        (REPOSITORY / "benchmarks" / "learning.py").read_text(),
    )
    heads = re.search(r"^\| loss .*$", text, re.MULTILINE)[0]
    assert heads in script
