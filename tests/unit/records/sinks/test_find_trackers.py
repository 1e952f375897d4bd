"""The names in `run.trackers`, and sinks of the user."""

import csv
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from megagrpo.config import ConfigError, ProblemError, load_config
from megagrpo.config.sections.tracker_options import TRACKER_PACKAGES
from megagrpo.records.sinks.find_trackers import CLASSES, SINK_METHODS, check_trackers, make_sink, unused_options
from megagrpo.records.sinks.sink import TrackedRun
from tests.unit.records.sinks.tracked import CONFIG, write

PAGE = (Path(__file__).parents[4] / "docs" / "trackers.md").read_text()
SINKS = """
class Empty:
    def __init__(self, run): ...

class TakesNothing:
    def step(self, step, metrics): ...

class FewArguments:
    def __init__(self, run): ...
    def step(self, metrics): ...

class Breaks:
    def __init__(self, run):
        self.file = run.folder / "steps"
    def step(self, step, metrics):
        self.file.write_text(str(step))
        raise RuntimeError("no route to the dashboard")

class NoSpace(Breaks):
    def step(self, step, metrics):
        self.file.write_text(str(step))
        raise OSError(28, "No space left on device")

def function(run): ...
"""


def config(*trackers, **more):
    return load_config(
        CONFIG, [f"run.trackers=[{', '.join(map(str, trackers))}]", *(f"run.{k}={v}" for k, v in more.items())]
    )


def test_the_sink_of_the_page_writes_what_the_page_says(tmp_path):
    (code,) = re.findall(r"`my_sinks\.py`, whole:\n\n```python\n(.*?)```", PAGE, re.S)
    assert len(code.splitlines()) <= 20
    (tmp_path / "my_sinks.py").write_text(code)
    write(tmp_path / "mine", f"run.trackers=[{tmp_path}/my_sinks.py:Sheet]")
    with (tmp_path / "mine" / "sheet.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines == [
        ["step", "reward", "best response"],
        *([str(step), str(step / 10), "7 <b>|`*\n?"] for step in (1, 2)),
    ]


def test_a_file_beside_the_yaml_is_found_from_any_folder(tmp_path):
    (tmp_path / "sinks.py").write_text(SINKS)
    (tmp_path / "run.yaml").write_text(f"defaults: {CONFIG}\nrun: {{trackers: ['sinks.py:Breaks']}}\n")
    assert load_config(tmp_path / "run.yaml").run.trackers == [f"{tmp_path}/sinks.py:Breaks"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/none.py:Sink", "cannot be loaded: FileNotFoundError: no file"),
        (
            "{}/sinks.py:Missing",
            "has no function or class `Missing`; it has: Empty, TakesNothing, FewArguments, Breaks, NoSpace, function",
        ),
        ("{}/sinks.py:function", "is not a class"),
        ("{}/sinks.py:Empty", "defines no method that a run calls: step, evaluation, completions, message, close"),
        ("{}/sinks.py:TakesNothing", "write __init__(self, run)"),
        ("{}/sinks.py:FewArguments", "write step(self, step, metrics)"),
    ],
    ids=["no file", "no class", "function", "no method", "takes nothing", "few arguments"],
)
def test_a_sink_that_cannot_be_used_is_named_with_its_key_and_its_file(name, said, tmp_path):
    (tmp_path / "sinks.py").write_text(SINKS)
    with pytest.raises(ProblemError, match=re.escape(said)) as raised:
        check_trackers(["tensorboard", name.format(tmp_path)])
    assert str(raised.value).startswith(f"run.trackers.1: `{name.format(tmp_path)}` ")


@pytest.mark.parametrize(
    ("name", "error"),
    [("Breaks", "RuntimeError: no route to the dashboard"), ("NoSpace", "OSError: [Errno 28] No space left on device")],
    ids=["raises", "no space"],
)
def test_a_sink_that_raises_is_reported_once_and_not_called_again(name, error, tmp_path, capsys):
    (tmp_path / "sinks.py").write_text(SINKS)
    write(tmp_path / "mine", f"run.trackers=[{tmp_path}/sinks.py:{name}]")
    said = f"warning: {tmp_path}/sinks.py:{name} failed and may be incomplete; training continues. {error}\n"
    assert capsys.readouterr().err == said and (tmp_path / "mine" / "steps").read_text() == "1"
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        (
            "[wandbb]",
            "run.trackers.0: `wandbb` is not a known tracker; did you mean `wandb`?; known: tensorboard, wandb, "
            "trackio;",
        ),
        ("[otel]", "run.trackers.0: `otel` is a file of the repository; name it as examples/trackers/otel.py:OtelSink"),
        ("[tensorboard, tensorboard]", "run.trackers.1: `tensorboard` is listed twice; remove one"),
        ("wandb", "run.trackers: must be a list"),
    ],
)
def test_a_wrong_entry_is_named_when_the_config_is_loaded(trackers, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(CONFIG, [f"run.trackers={trackers}"])


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_without_its_package_is_named_with_the_command_that_installs_it(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package: None if package in TRACKER_PACKAGES[name] else object()
    )
    packages = TRACKER_PACKAGES[name]
    said = f"`{name}` needs {', '.join(packages)}, which is not installed: pip install {' '.join(packages)}; or remove"
    with pytest.raises(ProblemError, match=re.escape(f"run.trackers.0: {said}")):
        check_trackers([name])
    write(tmp_path / "mine", f"run.trackers=[{name}]")  # a package that disappears later does not stop the run
    assert said in capsys.readouterr().err


def test_options_of_a_tracker_that_the_run_does_not_use_are_noted():
    (note,) = unused_options(config("tensorboard", "wandb", trackio="{group: x}", wandb="{mode: offline}").run)
    assert note == "note: run.trackio has options, but run.trackers does not name trackio, so the run does not use it"


def test_the_page_names_every_tracker_and_every_method():
    assert CLASSES.keys() == TRACKER_PACKAGES.keys()
    for name in CLASSES:
        assert f"`{name}`" in PAGE
    for name in SINK_METHODS:
        assert f"`{name}(" in PAGE


def test_rows_of_completions_json_are_what_a_sink_gets(tmp_path):
    (tmp_path / "keeps.py").write_text(
        "import json\nclass Keeps:\n    def __init__(self, run):\n        self.file = run.folder / 'rows'\n"
        "    def completions(self, step, rows):\n        self.file.open('a').writelines(ascii(row['completion']) + "
        "'\\n' for row in rows)\n"
    )
    write(tmp_path / "mine", f"run.trackers=[{tmp_path}/keeps.py:Keeps]", "run.log_completions_steps=0")
    rows = [json.loads(line) for line in (tmp_path / "mine" / "completions.jsonl").read_text().splitlines()]
    assert [ascii(row["completion"]) for row in rows] == (tmp_path / "mine" / "rows").read_text().splitlines()
    assert "extra" not in rows[0] and rows[1]["extra"] == {"exact/found": "7"}
    shutil.rmtree(tmp_path / "mine")


def test_a_tracker_of_the_user_reads_no_rows_between_its_steps(tmp_path):
    """A step of 100,000 responses is gigabytes, which `completions.jsonl` holds."""
    (tmp_path / "own.py").write_text(
        "from megagrpo.records.sinks.sink import TrackerSink\n"
        "class Own(TrackerSink):\n    seen = []\n    def table(self, step, rows):\n"
        "        self.seen.append((step, next(iter(rows))))\n"
    )

    class Rows(list):
        def __iter__(self):
            yield self[0]
            raise AssertionError("the second row is read")

    config = load_config(CONFIG, ["run.log_completions_steps=2"])
    sink = make_sink(f"{tmp_path}/own.py:Own", TrackedRun(tmp_path, config))
    for step in (1, 2, 3):
        sink.completions(step, Rows([{"step": step}, {}]))
    sink.step(3, {})
    sink.close(failed=True)
    assert sink.seen == [(2, {"step": 2})]
