"""A page has no credential and no home directory, wherever the run wrote them."""

import base64
import gzip
import html
import re

from megagrpo.proof.report import page
from megagrpo.proof.report.collect import read_run
from megagrpo.proof.report.payload import labels, payload
from megagrpo.proof.report.privacy import clean_row, without_homes, without_secrets
from tests.unit.for_each import for_each
from tests.unit.proof.report.synthetic import append, make_run


def opened(text: str) -> str:
    """A page's HTML, followed by what its base64 holds."""
    parts = re.findall(r'<script type="text/plain" id="[^"]*">([^<]*)</script>', text)
    return "\n".join([html.unescape(text), *(gzip.decompress(base64.b64decode(part)).decode() for part in parts)])


@for_each(
    "text, shown",
    [
        ('File "/home/erika/rewards/mine.py", line 3', 'File "~/rewards/mine.py", line 3'),
        ("/Users/max and /root/x, /scratch/x", "~ and ~/x, /scratch/x"),
        ("https://erika:pw@10.1.2.3/x https://huggingface.co/a/b", "https://10.1.2.3/x https://huggingface.co/a/b"),
        ("hf_abcdefghijkl and Bearer abcdefghijklmnop", "<credential> and <credential>"),
        ("reward 1/2, a / b, s3://bucket/a/b 127.0.0.1", "reward 1/2, a / b, s3://bucket/a/b 127.0.0.1"),
    ],
)
def test_notes_have_no_home_directory_and_no_credential(text, shown):
    assert without_secrets(text) == shown


def test_tokens_that_spell_a_home_directory_are_left_out():
    row = {"step": 1, "tokens": ["see /home", "/erika", "/x"], "rollout_logprobs": [0.0, 0.0, 0.0]}
    assert "tokens" not in clean_row(row) and clean_row(row | {"tokens": ["/", "etc"]})["tokens"] == ["/", "etc"]


def test_a_text_without_spaces_is_searched_in_linear_time():
    for text in ("x" * 200_000, "/" * 200_000, "/a" * 100_000, "a." * 100_000, "/." * 100_000, "http://" * 30_000):
        assert without_secrets(text)  # a quadratic search takes minutes: the time limit of a test


def test_a_page_holds_no_home_directory_and_no_credential(tmp_path):
    run = make_run(tmp_path / "run", steps=2, groups=1, overrides=("data.train.source=/home/zoltan/sets/a.jsonl",))
    trace = 'Traceback:\n  File "/home/zoltan/mine.py", line 1, in f\nOSError: hf_abcdefghijklmnop'
    append(run / "messages.jsonl", {"step": 2, "text": f"warning: {trace}"})
    row = {"step": 3, "prompt_id": 9, "prompt": [{"role": "user", "content": "read /home/zoltan/notes"}]}
    row |= {"completion": "cat /home/zoltan/x", "finish_reason": "stop", "reward": 1.0, "rewards": {"f": 1.0}}
    tool = {"messages": [{"role": "tool", "content": "/home/zoltan: no such file"}]}
    append(run / "completions.jsonl", row | {"extra": {"error": trace}, "dialogue": tool})
    config = (run / "resolved.yaml").read_text()
    (run / "resolved.yaml").write_text(config.replace("    weight: ", "    api_key: s3cret-value\n    weight: "))
    text = opened(page.render(payload([read_run(run)], page.static_bytes())))
    assert "~/mine.py" in text and "~/sets/a.jsonl" in text and "read ~/notes" in text
    assert [name for name in ("zoltan", "hf_abcdefghijklmnop", "s3cret-value") if name in text] == []
    assert 'api_key","<credential>"' in text and without_homes("a/home") == "a/home"


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
