"""A whole run on prompts with escape sequences, with a reward that raises, prints and logs them: none reaches the
terminal."""

import json
import re

import pytest

from tests.e2e import world

ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202egnitirw"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
REWARD = f"""
def raises(completions, **columns):
    print({ESCAPES!r}, "printed", flush=True)
    if {ESCAPES!r} in columns["prompt_again"][0]:
        raise RuntimeError({ESCAPES!r} + " raised")
    return [float(len(c)) for c in completions]
"""


@pytest.mark.full
def test_a_run_shows_hostile_prompts_and_errors_and_sends_no_escape_to_the_terminal(tmp_path):
    rows = [
        {"prompt": f"What is {ESCAPES} {i}?", "answer": "1", "prompt_again": ESCAPES if i == 0 else "fine"}
        for i in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "mine.py").write_text(REWARD)
    options = [
        f"data.train.source={tmp_path}/train.jsonl",
        f"rewards.functions=[{{function: {tmp_path}/mine.py:raises}}]",
    ]
    run = world.train(tmp_path, *options, "run.log_completions_steps=1", "rollout.max_prompt_length=128", launched=True)
    assert run.code == 0, run.err
    assert r"\x1b]52;c;ZXZpbA==\x07" in run.out and " raised" in run.err and " printed" in run.err
    assert not STEERS.search(run.out) and not STEERS.search(run.err)
    assert ESCAPES in run.completions[0]["prompt"]  # files keep the text
