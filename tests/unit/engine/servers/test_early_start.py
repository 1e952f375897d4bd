"""A vLLM process that starts before its server is known: it becomes the server, or ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megagrpo.commands.api.train_call import run_training
from megagrpo.config import load_config
from megagrpo.engine.servers import early_start
from megagrpo.engine.servers.serving import make_launcher
from tests.unit.waiting import wait_until

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"
STAND_IN = """
import sys, time
from megagrpo.sync.vllm_side.vllm_main import _wait_for_server
print("imported", flush=True)
_wait_for_server()
print("server", sys.argv[1:], open("/dev/stdin").read(), flush=True)
time.sleep(600)
"""
TRAINER = """
import sys
from pathlib import Path
from megagrpo.commands.api.train_call import run_training
from megagrpo.config import load_config
from megagrpo.engine.servers import early_start
early_start.PROGRAM = [sys.executable, {program!r}]
early_start.begin(load_config(Path({config!r})).rollout, 0)
print(early_start._waiting[0].supervisor.pid, flush=True)
input()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A process in place of vLLM that waits for its server."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(early_start, "PROGRAM", [sys.executable, str(tmp_path / "stand_in.py")])
    yield early_start.PROGRAM
    early_start._end()


def configured(*overrides):
    return load_config(QUICKSTART, list(overrides))


def test_the_waiting_process_becomes_the_server_and_logs_to_its_log(program, tmp_path):
    early_start.begin(configured().rollout, 0)
    waiting, log = early_start._waiting[0], tmp_path / "vllm_0.log"
    wait_until(lambda: "imported" in waiting.output.read_text())
    log.touch()
    supervisor = early_start.take([*program, "--port", "7"], waiting.environment, log, "the token")
    assert supervisor is waiting.supervisor and early_start.take([*program], waiting.environment, log, "") is None
    wait_until(lambda: "server ['--port', '7'] the token" in log.read_text())
    assert log.read_text().startswith("imported")
    (server,) = psutil.Process(supervisor.pid).children()
    assert " ".join(server.cmdline()).endswith("stand_in.py --port 7")  # what ps shows
    supervisor.terminate()
    assert supervisor.wait(20) == 0 and not server.is_running()


def test_a_fork_of_the_trainer_that_holds_the_pipe_open_does_not_delay_the_server(program, tmp_path):
    early_start.begin(configured().rollout, 0)
    waiting, log = early_start._waiting[0], tmp_path / "vllm_0.log"
    log.touch()
    held = os.dup(waiting.supervisor.stdin.fileno())  # as a fork holds it
    supervisor = early_start.take(program, waiting.environment, log, "the token")
    wait_until(lambda: "server [] the token" in log.read_text())
    os.close(held)
    supervisor.terminate()
    assert supervisor.wait(20) == 0


def test_a_process_whose_environment_is_not_the_servers_is_ended(program, tmp_path):
    early_start.begin(configured().rollout, 0)
    supervisor, environment = early_start._waiting[0][:2]
    assert early_start.take(program, environment | {"OMP_NUM_THREADS": "63"}, tmp_path / "log", "") is None
    assert supervisor.poll() is not None and not early_start._waiting


def test_a_server_starts_by_itself_where_the_waiting_process_was_killed(program, tmp_path):
    early_start.begin(configured().rollout, 0)
    supervisor, environment = early_start._waiting[0][:2]
    supervisor.kill()
    supervisor.wait()
    assert early_start.take(program, environment, tmp_path / "log", "") is None


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_no_process_stays_behind_a_trainer_without_a_server(program, how):
    code = TRAINER.format(program=program[1], config=str(QUICKSTART))
    trainer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    supervisor = psutil.Process(int(trainer.stdout.readline()))
    if how == "killed":
        trainer.kill()
    else:
        print(file=trainer.stdin, flush=True)
    assert trainer.wait(20) == (0 if how == "exits" else -9)
    if how == "killed":
        wait_until(lambda: not supervisor.is_running())
    assert not supervisor.is_running()


def test_the_waiting_process_ends_when_its_pipe_is_closed(program):
    early_start.begin(configured().rollout, 0)
    supervisor = early_start._waiting[0].supervisor
    supervisor.stdin.close()
    assert supervisor.wait(20) == 0


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.servers=2", "rollout.tp=2", "rollout.kv_cache_gb=2.5"),
        ("lora.rank=8", "lora.sync=adapter"),
        ("rollout.max_num_seqs=8", "model.precision=bf16"),
    ],
    ids=str,
)
def test_its_environment_is_that_of_the_runs_first_server(overrides, program, tmp_path):
    config = configured(*overrides)
    shutil.copy(QUICKSTART.parent / "models/Qwen/Qwen3-0.6B/config.json", tmp_path)
    early_start.begin(config.rollout, config.lora.rank if config.lora.syncs_adapters else 0)
    launcher = make_launcher(config, tmp_path, tmp_path, "float32", num_ranks=1)
    assert launcher._environment(0) == early_start._waiting[0].environment
    early_start._end()


@pytest.mark.parametrize("override", ["rollout.urls=[http://127.0.0.1:8000]", "rollout.interface=eth7"])
def test_it_starts_only_for_a_server_of_this_host(override, program):
    early_start.begin(configured(override).rollout, 0)
    assert not early_start._waiting


@pytest.mark.parametrize(("gpus", "starts"), [(0, True), (1, False)])
def test_a_run_of_one_rank_starts_it_on_a_machine_without_a_gpu(gpus, starts, tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("megagrpo.cluster.launch.local.num_gpus", lambda: gpus)
    monkeypatch.setattr(early_start, "begin", lambda rollout, lora_rank: begun.append(lora_rank))
    monkeypatch.setattr("megagrpo.trainer.rank.make_trainer", stop)
    with pytest.raises(Stopped):
        run_training(str(QUICKSTART), [f"run.output_dir={tmp_path}"])
    assert bool(begun) == starts


class Stopped(BaseException):
    """Raised in place of a trainer."""


def stop(*_):
    raise Stopped


@pytest.mark.full  # runs that start their own server use the program, too (tests/e2e)
def test_the_real_program_waits_with_vllm_imported_and_leaves_the_token(tmp_path):
    log, token = tmp_path / "vllm_0.log", "a-token-of-the-tests"
    log.touch()
    early_start.begin(configured().rollout, 0)
    environment = early_start._waiting[0].environment
    supervisor = early_start.take([*early_start.PROGRAM, "--model", str(tmp_path / "missing")], environment, log, token)
    assert supervisor.wait(120) == 1
    assert "missing" in log.read_text() and os.path.getsize(log)
