"""Reward functions in real worker processes: deadlines, failures, protocol, and that no process outlives its
trainer."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megagrpo.config import RewardsSection
from megagrpo.config.basics.paths import anchored
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout
from tests.distributed.suites import usual

USER_REWARDS = """
import asyncio, ctypes, os, sys, time
from helper_beside import BONUS

def length(completions, **kwargs):
    return [float(len(c)) + BONUS for c in completions]

def hangs_in_python(completions):
    while "hang" in "".join(completions):
        pass
    return [1.0] * len(completions)

def sleeps(completions):
    if any("hang" in c for c in completions):
        time.sleep(3600)
    return [1.0] * len(completions)

def hangs_in_c(completions):
    if any("hang" in c for c in completions):
        ctypes.PyDLL(None).sleep(3600)  # holds the GIL: no signal handler and no other thread of Python runs
    return [1.0] * len(completions)

def slow(completions):
    time.sleep(0.3 * len(completions))
    return [float(len(completions))] * len(completions)

def raises(completions):
    for c in completions:
        if "bad" in c:
            raise RuntimeError("no such thing as " + c)
    return [1.0] * len(completions)

def exits(completions):
    if "bad" in completions:
        sys.exit(3)
    if "die" in completions:
        os._exit(7)
    return [1.0] * len(completions)

def odd_values(completions):
    return [{"nan": float("nan"), "inf": float("inf"), "text": "high", "none": None, "true": True}.get(c, 2) for c in completions]

def talks(completions):
    print("x" * 100_000)
    os.write(1, b"raw bytes to standard output")
    print("input:", repr(sys.stdin.read()))
    return [1.0] * len(completions)

async def waits(completions):
    await asyncio.sleep(0.01)
    return [3.0] * len(completions)

def torch_or_pydantic_is_loaded(completions):
    return [float(bool({"torch", "pydantic", "yaml"} & sys.modules.keys()))] * len(completions)

def sees(prompts, completions, completion_ids, finish_reason, is_truncated, trainer_state, question, difficulty=None, scale=1.0):
    assert [len(x) for x in (prompts, completions, finish_reason, question)] == [len(completion_ids)] * 4
    assert is_truncated == [reason == "length" for reason in finish_reason]
    scale *= 1 + trainer_state.global_step
    return [scale * (len(ids) + (reason == "length") + len(q)) for ids, reason, q in zip(completion_ids, finish_reason, question)]

def sees_messages(prompts, completions):
    return [float(p[-1]["role"] == "user" and c == [{"role": "assistant", "content": "a"}]) for p, c in zip(prompts, completions)]

def sees_prefixes(completions, prefixes):
    return [float(len(prefix)) for prefix in prefixes]

def gives_process(completions):
    return [float(os.getpid())] * len(completions)

def leaves_child_and_hangs(completions, note):
    import subprocess
    child = subprocess.Popen(["sleep", "3600"])
    with open(note[0], "w") as file:
        file.write(str(child.pid))
    time.sleep(3600)

def leaves_a_file_and_hangs(completions, note):
    import tempfile
    folder = tempfile.mkdtemp()
    with open(note[0], "w") as file:
        file.write(folder)
    time.sleep(3600)


def leaves_deep_folders(completions, note):
    import tempfile
    os.chdir(tempfile.mkdtemp())
    for _ in range(1100):
        os.mkdir("a")
        os.chdir("a")
    with open(note[0], "w") as file:
        file.write(tempfile.gettempdir())
    os.umask(0o777)
    os.mkdir("closed")
    return [1.0] * len(completions)

def numbers(completions, answer, least=0):
    return [1.0] * len(completions)

def number_fault(answer, least=0):
    if answer == "hang":
        time.sleep(3600)
    return None if int(answer) >= least else f"`answer` is below {least}: {answer}"

async def careful(completions, **columns):
    return [1.0] * len(completions)

numbers.row_fault = number_fault
careful.row_fault = lambda **columns: ", ".join(columns)

class Judge:
    def __init__(self, wanted):
        self.wanted = wanted

    def row_fault(self, level):
        return None if level == self.wanted else 7

    def __call__(self, completions):
        return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(USER_REWARDS)
    (path / "helper_beside.py").write_text("BONUS = 0.5\n")
    (path / "broken.py").write_text("import no_such_module_at_all\n")
    return path


def scorer(folder, *functions, timeout=10.0, workers=2):
    values = {"rewards": {"functions": [dict(f) if isinstance(f, dict) else {"function": f} for f in functions]}}
    section = RewardsSection(**anchored(values, folder)["rewards"], timeout=timeout, workers=workers)
    return RewardScorer(section, max_completion_length=100, base_folder=folder)


def rollouts(*texts, group=1, messages="Q", columns=None, ids=None, finish_reason="stop"):
    ids = ids or [(1, 2, 3)] * len(texts)
    prompts = [Prompt(i // group, (1,), messages, columns or {}) for i in range(len(texts))]
    return [Rollout(p, i, (0.0,) * len(i), finish_reason, 0, t) for p, t, i in zip(prompts, texts, ids, strict=True)]


def rewards_of(scored, name):
    return [s.rewards[name] for s in scored]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all processes end within `seconds`."""
    deadline = time.monotonic() + seconds
    while any(map(running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_order_is_kept_and_the_weighted_sum_skips_functions_that_cannot_score(folder):
    texts = [str(n) for n in range(40)]
    batch = rollouts(*texts, columns={"answer": "7"})
    with scorer(
        folder,
        {"function": "exact_number", "weight": 2.0},
        "mine.py:length",
        {"function": "mine.py:length", "weight": -1},
    ) as s:
        scored = s.score(batch)
        assert s.names == ["exact_number", "length", "length_2"]
        assert [r.rollout for r in scored] == batch
        assert [r.reward for r in scored] == [2.0 if t == "7" else 0.0 for t in texts]
        unscorable = s.score(rollouts("7", columns={"answer": "seven"}))[0]
        assert unscorable.rewards == {"exact_number": None, "length": 1.5, "length_2": 1.5} and unscorable.reward == 0.0
        assert s.score([]) == []


def test_a_rollout_that_no_function_can_score_has_reward_nan(folder):
    with scorer(folder, "exact_number") as s:
        scored = s.score(rollouts("7", "8", columns={"answer": "seven"}))
        assert all(math.isnan(r.reward) and r.rewards == {"exact_number": None} for r in scored)
        metrics = s.metrics()
        assert metrics["rewards/exact_number/unscorable"] == 2 and math.isnan(metrics["rewards/exact_number/mean"])


@pytest.mark.parametrize("function", usual(["hangs_in_python", "sleeps", "hangs_in_c"], 0, 2))
def test_a_reward_that_hangs_costs_its_own_completion_only(folder, function):
    with scorer(folder, f"mine.py:{function}", timeout=0.6) as s:
        scored = s.score(rollouts("a", "b", "hang", "d", "e", "f"))
        assert rewards_of(scored, function) == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
        assert s.metrics()[f"rewards/{function}/timeouts"] == 1
        assert rewards_of(s.score(rollouts("a", "b")), function) == [1.0, 1.0]  # after a restart of the worker
        assert s.metrics()[f"rewards/{function}/timeouts"] == 0


@pytest.mark.full  # `hangs_in_c` above is the same without sympy
def test_a_sympy_expression_that_never_ends_is_cut_off(folder):
    columns = {
        "question": "q",
        "answer": "1",
        "metadata": {"source_dataset": "countdown", "target": 24, "numbers": [9, 9, 9, 9]},
    }
    with scorer(folder, "reasoning_gym", timeout=0.4, workers=1) as s:
        s.check_columns(columns)
        assert s.score(rollouts("<answer>9**9**9**9</answer>", columns=columns))[0].reward == 0.0
        assert s.metrics()["rewards/reasoning_gym/timeouts"] == 1


def test_children_of_a_killed_worker_die_with_it(folder, tmp_path):
    note = tmp_path / "pid"
    with scorer(folder, "mine.py:leaves_child_and_hangs", timeout=1.0) as s:
        assert s.score(rollouts("a", columns={"note": str(note)}))[0].reward == 0.0
        assert gone([int(note.read_text())])


def test_temporary_files_of_a_killed_worker_are_removed(folder, tmp_path):
    note = tmp_path / "folder"
    with scorer(folder, "mine.py:leaves_a_file_and_hangs", timeout=1.0) as s:
        assert s.score(rollouts("a", columns={"note": str(note)}))[0].reward == 0.0
        assert note.read_text() and not Path(note.read_text()).exists()


def test_deep_folders_of_a_reward_are_removed_with_its_worker(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    note = tmp_path / "folder"
    with scorer(folder, "mine.py:leaves_deep_folders") as s:
        assert s.score(rollouts("a", columns={"note": str(note)}))[0].reward == 1.0
        assert Path(note.read_text()).parent == Path("/dev/shm") and Path(note.read_text()).exists()
    assert not Path(note.read_text()).exists()


def test_a_function_too_slow_for_its_share_of_the_batch_loses_nothing(folder):
    with scorer(folder, "mine.py:slow", timeout=1.0) as s:
        assert [r.reward for r in s.score(rollouts(*"abcdefgh", group=8))] == [8.0] * 8
    with scorer(folder, {"function": "mine.py:slow", "independent": True}, timeout=1.0) as s:
        # eight at once miss the deadline
        assert [r.reward for r in s.score(rollouts(*"abcdefgh", group=8))] == [1.0] * 8
        assert s.metrics()["rewards/slow/timeouts"] == 0
        begun = time.monotonic()
        assert [r.reward for r in s.score(rollouts(*"abcd", group=4))] == [1.0] * 4  # one by one from the start now
        assert time.monotonic() - begun < 1.2


@pytest.mark.parametrize("function", ["raises", "exits"])
def test_a_reward_that_raises_or_exits_scores_0_for_that_completion(folder, function, caplog):
    with scorer(folder, f"mine.py:{function}") as s:
        assert rewards_of(s.score(rollouts("a", "b", "bad", "d")), function) == [1.0, 1.0, 0.0, 1.0]
        assert s.metrics()[f"rewards/{function}/exceptions"] == 1
    if function == "raises":
        assert 'mine.py", line' in caplog.text and "RuntimeError: no such thing as bad" in caplog.text
        assert "workers/worker.py" not in caplog.text  # only the user's traceback
    else:
        assert "SystemExit: 3" in caplog.text  # caught: the worker stays alive


def test_a_worker_that_dies_is_counted_and_replaced(folder, caplog):
    with scorer(folder, "mine.py:exits", workers=1) as s:
        assert rewards_of(s.score(rollouts("a", "die", "c")), "exits") == [1.0, 0.0, 1.0]
        assert s.metrics()["rewards/exits/exceptions"] == 1
    assert "exit code 7" in caplog.text


def test_a_worker_killed_while_idle_is_replaced(folder):
    with scorer(folder, "mine.py:gives_process", workers=1) as s:
        first = int(s.score(rollouts("a"))[0].reward)
        os.kill(first, signal.SIGKILL)
        assert gone([first])
        assert int(s.score(rollouts("a"))[0].reward) != first
        assert s.metrics()["rewards/gives_process/exceptions"] == 0


def test_a_value_that_is_no_number_is_an_error_of_its_completion(folder):
    with scorer(folder, {"function": "mine.py:odd_values"}) as s:
        scored = s.score(rollouts("nan", "inf", "text", "none", "true", "x"))
        assert rewards_of(scored, "odd_values") == [0.0, 0.0, 0.0, None, 1.0, 2.0]
        assert s.metrics()["rewards/odd_values/exceptions"] == 3 and s.metrics()["rewards/odd_values/unscorable"] == 1


def test_what_a_reward_prints_does_not_break_the_protocol(folder, capfd):
    with scorer(folder, "mine.py:talks") as s:
        assert [r.reward for r in s.score(rollouts("a", "b"))] == [1.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and "raw bytes" in err and "input: ''" in err


def test_coroutines_are_awaited_and_torch_and_pydantic_stay_out_of_the_workers(folder):
    with scorer(folder, "mine.py:waits", "mine.py:torch_or_pydantic_is_loaded", "accuracy") as s:
        scored = s.score(rollouts(r"\boxed{3}", columns={"answer": "3"}))
        assert scored[0].rewards == {"waits": 3.0, "torch_or_pydantic_is_loaded": 0.0, "accuracy": 1.0}


def test_a_function_gets_the_arguments_it_names_with_its_columns_and_args(folder):
    batch = rollouts("a", "b", columns={"question": "four", "unused": 1}, ids=[(1,), (1, 2)], finish_reason="length")
    with scorer(folder, {"function": "mine.py:sees", "args": {"scale": 10.0}}) as s:
        s.check_columns(["question"])
        assert [r.reward for r in s.score(batch)] == [60.0, 70.0]
        assert [r.reward for r in s.score(batch, step=2)] == [180.0, 210.0]
    with scorer(folder, "mine.py:sees_messages") as s:
        batch = rollouts("a", "a", messages=[{"role": "user", "content": "Q"}])
        assert [r.reward for r in s.score(batch)] == [1.0, 1.0]


def test_a_function_gets_what_the_chat_template_opened_for_each_completion(folder):
    batch = rollouts("It is 3.</think>3", "It is 3.")
    opened = [replace(r, prompt=replace(r.prompt, opened="<think>\n")) for r in batch]
    with scorer(folder, "think_format", "mine.py:sees_prefixes") as s:
        scored = s.score([*batch, *opened])
    assert [r.rewards["think_format"] for r in scored] == [0.0, 0.0, 1.0, 0.0]
    assert [r.rewards["sees_prefixes"] for r in scored] == [0.0, 0.0, 8.0, 8.0]


def test_soft_overlong_takes_the_rollouts_maximum_unless_args_give_another(folder):
    batch = rollouts("a", "b", ids=[(1,) * 90, (1,) * 300])
    with scorer(
        folder, "soft_overlong", {"function": "soft_overlong", "args": {"floor": None, "cache_length": 10}}
    ) as s:
        scored = s.score(batch)
        assert rewards_of(scored, "soft_overlong") == [-0.5, -1.0]
        assert rewards_of(scored, "soft_overlong_2") == [0.0, -21.0]


def test_metrics_give_mean_and_unbiased_std_over_what_was_scored(folder):
    with scorer(folder, "exact_number") as s:
        batch = [r for t, a in [("1", "1"), ("2", "1"), ("3", "none")] for r in rollouts(t, columns={"answer": a})]
        s.score(batch)
        metrics = s.metrics()
        assert metrics["rewards/exact_number/mean"] == 0.5
        assert metrics["rewards/exact_number/std"] == pytest.approx(math.sqrt(0.5))
        assert metrics["rewards/exact_number/unscorable"] == 1
        assert 0 < metrics["rewards/exact_number/seconds"]


@pytest.mark.parametrize(
    "function, expected",
    [
        ("exact_numbr", ["not a known reward function", "did you mean `exact_number`", "accuracy, reasoning_accuracy"]),
        ("no_such_file.py:length", ["no file", "no_such_file.py"]),
        ("mine.py:lenght", ["has no function or class `lenght`", "length", "cannot be loaded"]),
        ("broken.py:length", ["no_such_module_at_all"]),
        ("no_such_package.rewards:f", ["No module named 'no_such_package'"]),
        (
            {"function": "soft_overlong", "args": {"cache": 5}},
            ["functions[0].args.cache", "did you mean `cache_length`"],
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_training(folder, function, expected):
    with pytest.raises(ValueError) as error:
        scorer(folder, function)
    for part in expected:
        assert part in str(error.value)


def test_all_functions_that_cannot_be_loaded_are_named_at_once(folder):
    with pytest.raises(ValueError) as error:
        scorer(folder, "mine.py:nothing", "exact_number", "broken.py:length")
    assert "functions[0]" in str(error.value) and "functions[2]" in str(error.value)


def test_a_missing_column_is_named_with_those_present(folder):
    with scorer(folder, "accuracy", "mine.py:sees") as s:
        s.check_columns(["answer", "question"])
        s.check_columns(["solution", "question"])
        with pytest.raises(ValueError) as error:
            s.check_columns(["quest", "gold"])
    assert "reward `accuracy` needs column `solution` or `answer`; the data set has quest, gold" in str(error.value)
    assert "reward `sees` needs column `question`; the data set has quest, gold; did you mean `quest`?" in str(
        error.value
    )
    with pytest.raises(ValueError, match="the data set has no column besides the prompt; add the column to each row"):
        s.check_columns([])


def test_functions_name_the_rows_that_they_cannot_score(folder):
    rows = [{"answer": "7", "level": 1}, {"answer": "3", "level": 2}, {"answer": "many", "level": 1}]
    functions = [{"function": "mine.py:numbers", "args": {"least": 5}}, "mine.py:careful", "mine.py:sleeps"]
    with scorer(folder, *functions, {"function": "mine.py:Judge", "args": {"wanted": 1}, "own_worker": True}) as s:
        found = s.row_faults(rows)
        assert found["numbers"][0] == (1, "`answer` is below 5: 3") and len(found["numbers"]) == 2
        assert found["numbers"][1][1].startswith("its row_fault fails: ValueError: invalid literal for int()")
        assert (
            found["careful"] == [(0, "answer, level"), (1, "answer, level"), (2, "answer, level")]
            and "sleeps" not in found
        )
        assert found["Judge"] == [(1, "its row_fault returned int; return a text or None")]
        assert rewards_of(s.score(rollouts("a", "b", columns=rows[0])), "numbers") == [1.0, 1.0]
    with scorer(folder, "mine.py:numbers", timeout=0.2) as s:
        assert s.row_faults([{"answer": "7"}, {"answer": "hang"}])["numbers"][0] == (
            0,
            "its row_fault fails: no answer within 0.2 s",
        )


def test_an_argument_from_the_config_stands_in_for_a_column(folder):
    with scorer(folder, {"function": "exact_number", "args": {"answer": ["7"]}}) as s:
        s.check_columns(["question"])
        assert s.score(rollouts("7"))[0].reward == 1.0


def test_modules_are_found_in_the_current_folder_and_beside_the_config(folder, tmp_path, monkeypatch):
    (tmp_path / "here.py").write_text("def two(completions):\n    return [2.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    with scorer(folder, "here:two", f"{tmp_path}/here.py:two", "mine:length") as s:
        assert s.score(rollouts("a"))[0].rewards == {"two": 2.0, "two_2": 2.0, "length": 1.5}


def test_close_leaves_no_process_behind(folder):
    s = scorer(folder, "mine.py:gives_process", workers=3)
    pids = [worker.process.pid for worker in s._pool._workers]
    s.score(rollouts(*"abcdef"))
    s.close()
    s.close()
    assert gone(pids, 0.1)


TRAINER = """
from megagrpo.rewards.workers.pool import Call, WorkerPool
from megagrpo.rewards.registry.reward_registry import resolve
pool = WorkerPool(2)
print(*[worker.process.pid for worker in pool._workers], flush=True)
call = Call(resolve("{folder}/mine.py:{function}"), arguments={{"completions": ["hang"]}}, timeout=600)
pool.run([call, call])
"""


@pytest.mark.parametrize(
    "function, kill",
    usual([("hangs_in_c", signal.SIGKILL), ("hangs_in_python", signal.SIGKILL), ("sleeps", signal.SIGTERM)], 0, 2),
)
def test_workers_die_with_a_killed_trainer_even_in_the_middle_of_a_reward(folder, function, kill):
    code = TRAINER.format(folder=str(folder), function=function)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        assert not gone(pids, 0.5)  # both are running the reward by now
        trainer.send_signal(kill)
        trainer.wait(10)
        assert gone(pids)
    finally:
        trainer.kill()
        trainer.wait()
