import base64
import gzip
import json
import random
import tracemalloc
from pathlib import Path

import pytest

from megagrpo.proof.report import page, shown_responses
from megagrpo.proof.report.collect import RunFiles, read_run
from megagrpo.proof.report.payload import MAX_BYTES, payload
from megagrpo.proof.report.shown_responses import (
    MAX_TOKENS,
    StepIndex,
    choose,
    chosen_steps,
    offers,
    ranking,
    read_group,
)
from megagrpo.proof.report.shown_texts import MAX_CHARACTERS, messages_of, text_of
from megagrpo.records.rows.jsonl_file import encoded
from tests.unit.proof.report.synthetic import append, make_run


def opened(chunk: str) -> list[dict]:
    return json.loads(gzip.decompress(base64.b64decode(chunk)))


def steps_with(rewards: dict[int, float | None]) -> RunFiles:
    return RunFiles(Path("run"), steps=[{"step": step, "reward": reward} for step, reward in rewards.items()])


def index_of(*groups: tuple[float | None, ...], tokens: int | None = None) -> StepIndex:
    """The index of a step with these rewards. `tokens` is a response that has tokens."""
    index = StepIndex(tokens={} if tokens is None else {tokens: 0})
    for prompt_id, rewards in enumerate(groups):
        for reward in rewards:
            index.add(prompt_id, reward, 0, None)
    return index


def test_a_small_run_is_on_the_page_as_a_whole(tmp_path):
    chosen = choose(read_run(make_run(tmp_path / "run", steps=5, groups=3, size=4)), 1_000_000)
    assert (
        list(chosen.chunks) == [1, 2, 3, 4, 5]
        and set(map(tuple, chosen.shown.values())) == {(3, 3)}
        and chosen.responses == [60, 60]
    )
    groups = opened(chosen.chunks[2])
    assert [len(one["responses"]) for one in groups] == [4, 4, 4]
    assert groups[0]["prompt"] == [["system", "Be brief."], ["user", "What is 2 + 0?"]]
    logged = [response for one in groups for response in one["responses"] if "tokens" in response]
    assert len(logged) == 4 and set(logged[0]["tokens"]) == {"text", "engine", "difference", "entropy", "left_out"}
    assert "".join(logged[0]["tokens"]["text"]) == logged[0]["text"]


@pytest.mark.parametrize("budget", [0, 12_000, 40_000])
def test_responses_use_no_more_than_the_budget(tmp_path, budget):
    chosen = choose(read_run(make_run(tmp_path / "run", steps=20, groups=6, size=4, length=60)), budget)
    assert sum(map(len, chosen.chunks.values())) <= budget and chosen.responses[0] < chosen.responses[1] == 480
    assert bool(chosen.chunks) == (budget > 0)


def test_tokens_take_a_part_of_the_room_and_groups_beyond_it_lose_their_numbers(tmp_path):
    chosen = choose(read_run(make_run(tmp_path / "run", steps=12, groups=3, size=4, length=80)), 40_000)
    logged = {
        step: ["tokens" in response for group in opened(chunk) for response in group["responses"]]
        for step, chunk in chosen.chunks.items()
    }
    assert len(logged) == 12 and any(logged[12]) and not all(any(of_step) for of_step in logged.values())


def test_of_many_steps_the_first_last_best_worst_and_even_ones_are_chosen():
    rewards: dict[int, float | None] = dict.fromkeys(range(1, 1001), 0.5)
    rewards |= {333: 0.9, 777: 0.1, 500: None}
    steps = chosen_steps(steps_with(rewards), range(1, 1001), most=10)
    assert {1, 1000, 333, 777} <= set(steps) and len(steps) == 10 and steps == sorted(steps)
    assert chosen_steps(steps_with({}), [3, 5], most=10) == [3, 5]
    assert chosen_steps(steps_with({}), range(100), most=4) == [0, 33, 66, 99]


def test_the_best_group_of_each_step_is_offered_before_the_second_one_and_the_last_step_first():
    groups = {step: index_of((0, 1), (1, 1)) for step in (10, 20, 30, 40, 50)}
    first = [step for step, index in offers(groups)][:5]
    assert first == [50, 10, 30, 20, 40] and [index for _, index in offers(groups)] == [0] * 5 + [1] * 5


def test_groups_with_tokens_come_first_then_the_extremes_then_the_widest():
    groups = index_of((0.5, 0.5), (0, 1), (1, 1), (None, None), (0.4, 0.6), (0.5, 0.5), tokens=11)
    assert ranking(groups) == [5, 2, 3, 1, 4, 0]
    assert ranking(StepIndex()) == []


def test_two_groups_of_the_same_prompt_stay_apart_when_the_group_size_is_known():
    for size, responses in ((2, [2, 2]), (None, [4])):
        index = StepIndex()
        for _ in range(4):
            index.add(7, 0.5, 0, size)
        assert [len(index.responses(group)) for group in range(len(index))] == responses
        index.add(8, 0.5, 0, size)
        assert index.prompt_ids[-2:] == [7, 8]


def test_a_prompt_of_any_shape_is_pairs_of_role_and_text():
    assert messages_of("a") == [["user", "a"]] and messages_of(None) == [["user", ""]]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "ü"}]},
        {"content": None},
        "odd",
        {"role": 3, "content": {"a": 1}},
    ]
    assert messages_of(parts) == [["user", '[{"type": "text", "text": "ü"}]'], ["", ""], ["", "odd"], ["3", '{"a": 1}']]


def test_control_characters_are_escapes_and_a_long_text_loses_its_middle():
    assert text_of("a\x1b[31m\u202eb\ud800\x00\n\t") == "a\\x1b[31m\\u202eb\\ud800\\x00\n\t"
    text = text_of("a" * 3_000_000 + "b")
    assert len(text) < MAX_CHARACTERS + 60 and "2,996,001 characters left out" in text and text.endswith("b")


def test_responses_with_missing_fields_are_shown_and_tokens_of_another_response_are_not(tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    append(tmp_path / "completions.jsonl", {"step": 1})
    append(
        tmp_path / "completions.jsonl",
        dict(step=1, prompt_id=3, task="ma\u202eth", completion="b", reward=None, rewards=None, finish_reason="length"),
    )
    for sample, prompt_id in ((1, 4), (2, 3), (-1, 3), ("x", 3)):
        append(tmp_path / "tokens.jsonl", {"step": 1, "sample": sample, "prompt_id": prompt_id, "tokens": ["b"]})
    first, second = opened(choose(read_run(tmp_path), 10_000).chunks[1])
    assert (
        first["responses"][0]["text"] == ""
        and second["responses"][0]["cut"]
        and second["responses"][0]["reward"] is None
    )
    assert "tokens" not in second["responses"][0] and (first["task"], second["task"]) == ("", "ma\\u202eth")


def test_tokens_may_lack_numbers_and_long_ones_are_cut(tmp_path):
    append(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    append(tmp_path / "completions.jsonl", {"step": 1, "prompt_id": 3, "completion": "b"})
    row = dict(
        step=1, sample=0, prompt_id=3, tokens=["b", "\u202e"] * MAX_TOKENS, rollout_logprobs=[-1.0, None]
    ) | dict(entropy="x")
    append(tmp_path / "tokens.jsonl", row | {"trainer_logprobs": [-0.5, -2.0], "advantages": [0.756, None]})
    tokens = opened(choose(read_run(tmp_path), 100_000).chunks[1])[0]["responses"][0]["tokens"]
    assert (
        tokens["text"][:2] == ["b", "\\u202e"]
        and len(tokens["text"]) == MAX_TOKENS
        and tokens["left_out"] == MAX_TOKENS
    )
    assert (
        tokens["engine"][:3] == [-1, None, None]
        and tokens["difference"][:3] == [0.5, None, None]
        and tokens["entropy"][:2] == [None, None]
        and tokens["advantage"][:3] == [0.76, None, None]
    )


def repeated(run: Path, steps: int, copies: int) -> None:
    """Lengthen a run to `steps` steps, and each step to `copies` times its responses."""
    lines = {
        name: (run / name).read_bytes().splitlines(keepends=True)
        for name in ("metrics.jsonl", "completions.jsonl", "tokens.jsonl")
    }
    for name, rows in lines.items():
        by_step: dict[int, list[bytes]] = {}
        for row in rows:
            by_step.setdefault(json.loads(row)["step"], []).append(row)
        filled = sorted(step for step in by_step if step)
        with open(run / name, "wb") as file:
            for step in range(1, steps + 1):
                source = filled[step % len(filled)]
                for row in by_step[source] * (copies if name == "completions.jsonl" else 1):
                    file.write(row.replace(b'{"step": %d,' % source, b'{"step": %d,' % step, 1))


@pytest.mark.full
@pytest.mark.parametrize("responses", [64, pytest.param(512, marks=pytest.mark.full)])
def test_the_page_of_a_thousand_steps_is_smaller_than_three_megabytes(tmp_path, responses):
    run = make_run(tmp_path / "run", steps=20, groups=4, size=16, length=300, evaluate=False)
    repeated(run, 1000, responses // 64)
    data = payload([read_run(run)], page.static_bytes())
    html = page.render(data)
    assert len(html.encode()) < 3_000_000 and len(html.encode()) > 0.5 * MAX_BYTES
    assert len(data.chosen[0].chunks) >= 20 and data.chosen[0].responses[1] == 1000 * responses
    assert {1, 1000} <= set(data.chosen[0].chunks)


def test_two_runs_share_the_size_of_the_page(tmp_path):
    runs = [make_run(tmp_path / name, steps=20, groups=4, size=8, length=60, seed=i) for i, name in enumerate("ab")]
    data = payload([read_run(run) for run in runs], page.static_bytes())
    assert len(page.render(data).encode()) < 3_000_000
    assert [one.responses for one in data.chosen] == [[640, 640]] * 2
    tight = [choose(read_run(run), 40_000).responses[0] for run in runs]
    assert 0 < min(tight) < 640 and min(tight) > 0.5 * max(tight)


def large_step(folder: Path, responses: int, characters: int) -> RunFiles:
    """A run of one step with long responses in groups of 4. The group of prompt 7 has the widest rewards."""
    append(folder / "metrics.jsonl", {"step": 1, "reward": 0.5})
    rng = random.Random(0)
    with open(folder / "completions.jsonl", "wb") as file:
        for i in range(responses):
            completion = f"{rng.randbytes(characters // 2).hex()}"
            row = {"step": 1, "prompt_id": i // 4, "prompt": "a", "completion": completion, "finish_reason": "stop"}
            file.write(encoded([row | {"reward": (i % 4) * (3.0 if i // 4 == 7 else 1.0)}]))
    return read_run(folder)


def test_the_texts_of_a_large_step_are_not_in_memory_together(tmp_path):
    run = large_step(tmp_path, 2000, 10_000)
    assert (tmp_path / "completions.jsonl").stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        chosen = choose(run, 200_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000, f"{peak:,} bytes"
    assert chosen.shown[1][1] == 500 and 7 in [group["prompt_id"] for group in opened(chosen.chunks[1])]


def test_of_large_steps_fewer_are_chosen_and_the_search_for_a_group_that_fits_ends(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=20, groups=4, size=4)
    for responses, most in ((6 * 16, 6), (1, 4)):
        monkeypatch.setattr(shown_responses, "MAX_RESPONSES", responses)
        steps = sorted(choose(read_run(folder), 1_000_000).chunks)
        assert most - 2 < len(steps) <= most and (steps[0], steps[-1]) == (1, 20)
    (tmp_path / "large").mkdir()
    run, read = large_step(tmp_path / "large", 400, 10_000), []
    monkeypatch.setattr(shown_responses, "MAX_SEARCH", 450_000)
    monkeypatch.setattr(shown_responses, "read_group", lambda *a: read.append(a[2]) or read_group(*a))
    assert not choose(run, 6_000).chunks and len(read) == 12, "groups of 40 kB"


def test_lines_in_another_form_and_unreadable_ones_keep_their_places(tmp_path):
    folder = make_run(tmp_path / "run", steps=4, groups=2, size=4)
    whole = {step: opened(chunk) for step, chunk in choose(read_run(folder), 1_000_000).chunks.items()}
    lines = (folder / "completions.jsonl").read_bytes().splitlines(keepends=True)
    lines[9] = json.dumps(dict(reversed(json.loads(lines[9]).items()))).encode() + b"\n"
    lines[10] = json.dumps(json.loads(lines[10]), separators=(",", ":")).encode() + b"\n"
    (folder / "completions.jsonl").write_bytes(
        b"".join([*lines[:12], b'{"step": 2, "prom\n', *lines[12:], b'{"step": 4'])
    )
    run = read_run(folder)
    assert {step: opened(chunk) for step, chunk in choose(run, 1_000_000).chunks.items()} == whole
    assert run.damaged == {"completions.jsonl": 2}
