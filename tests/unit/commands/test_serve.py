"""`megagrpo serve`: its instructions for a trainer elsewhere, and when it ends. tests/slurm runs it with real
servers."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megagrpo.__main__ import main
from megagrpo.commands.parser import parse
from megagrpo.config import load_config
from megagrpo.engine.http import server_calls as http
from megagrpo.engine.http.connections import healthy
from megagrpo.engine.http.protocol import EngineStartError
from megagrpo.engine.servers import remote as serve
from megagrpo.engine.servers import restarts
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.serve_inputs import report_start
from tests.unit.config.test_placement import QUICKSTART
from tests.unit.engine.servers.test_restarts import Stand, Wedged, impatient, kill, stop, wait_until


@pytest.fixture
def stand(tmp_path):
    """One server that may restart once."""
    (tmp_path / "config.json").write_text("{}")
    with Stand(ServerOptions(str(tmp_path), "float32", 64), tmp_path, max_restarts=1) as launcher:
        launcher.start()
        launcher.wait()
        yield launcher


def test_addresses_are_in_a_file_of_the_node_which_is_complete_or_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    report_start(tmp_path / "urls", "url", "http://10.0.0.2:1\nhttp://10.0.0.2:2\n")
    assert [path.name for path in (tmp_path / "urls").iterdir()] == ["n2.url"]
    assert (tmp_path / "urls" / "n2.url").read_text() == "http://10.0.0.2:1\nhttp://10.0.0.2:2\n"


def test_a_server_that_dies_is_started_again_and_with_the_last_one_for_good_it_ends(stand, monkeypatch, capsys):
    monkeypatch.setattr(serve, "SERVE_LOOP_SECONDS", 0.01)
    ended, watching = [], threading.Thread(target=lambda: ended.append(serve._watch(stand, threading.Event(), 60)))
    watching.start()
    kill(stand.servers[0])
    wait_until(lambda: stand.restarts[stand.urls[0]] and healthy(stand.urls[0]))
    assert not ended
    kill(stand.servers[0])
    watching.join(timeout=20)
    assert ended == [False]
    first, second = capsys.readouterr().err.splitlines()
    assert (
        f"warning: vLLM server {stand.urls[0]} was killed by SIGKILL; restarting it, 1 of 1 times "
        f"(rollout.max_restarts)" in first
    )
    assert f"{stand.urls[0]} was killed by SIGKILL; restart limit 1 reached (rollout.max_restarts); log: " in second


@pytest.mark.parametrize(
    "wedged", [pytest.param(False, id="stopped", marks=pytest.mark.full), pytest.param(True, id="wedged")]
)
def test_a_server_that_hangs_is_ended_and_started_again(wedged, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "SERVE_LOOP_SECONDS", 0.01)
    impatient(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    end = threading.Event()
    with Wedged(ServerOptions(str(tmp_path), "float32", 64), tmp_path, max_restarts=1) as launcher:
        launcher.start()
        launcher.wait()
        watching = threading.Thread(target=lambda: serve._watch(launcher, end, 0.6))
        watching.start()
        time.sleep(0.3)  # a healthy server stays
        assert not launcher.restarts
        (tmp_path / "wedged").touch() if wedged else stop(launcher.servers[0])
        wait_until(lambda: launcher.restarts)
        (tmp_path / "wedged").unlink(missing_ok=True)
        wait_until(lambda: healthy(launcher.urls[0]))
        end.set()
        watching.join()
    ending, again = capsys.readouterr().err.splitlines()
    engine = "is up, but its engine has not responded for 0.6 s (rollout.weight_sync_timeout)"
    words = engine if wedged else "has not passed a health check for 0.5 s"
    assert (
        ending == f"warning: vLLM server {again.split()[3]} {words}; killing it"
        and "restarting it, 1 of 1 times" in again
    )


def test_time_in_which_this_process_did_not_run_does_not_count_as_silence(monkeypatch):
    clock, silence = iter([0.0, 3.0, 1000.0, 1001.0, 1002.0]), http.Silence()
    monkeypatch.setattr(http.time, "monotonic", lambda: next(clock))
    assert [silence.goes_on("a") for _ in range(3)] == [0.0, 3.0, 3.0 + http.MAX_COUNTED_SECONDS]
    silence.heard("a")
    assert [silence.goes_on("a") for _ in range(2)] == [0.0, 1.0]


def test_a_detector_starved_of_cpu_reports_no_server_as_hung(stand, monkeypatch):
    impatient(monkeypatch)
    monkeypatch.setattr(restarts, "HANG_SECONDS", 0.0)
    monkeypatch.setattr(restarts, "CHECK_SECONDS", 0.0)
    watching = restarts.HangDetector(stand, 60)
    monkeypatch.setattr(stand.servers[0], "end", lambda: None)
    stop(stand.servers[0])
    for health_seconds, hung in ((-1.0, 0), (0.2, 1)):  # with the first value every response is too late
        monkeypatch.setattr(restarts, "HEALTH_SECONDS", health_seconds)
        lines = []
        for _ in range(2):  # the first check only begins to count
            watching.end_hung(lines.append)
        assert len(lines) == hung
    kill(stand.servers[0])


def test_it_ends_when_it_is_asked_to(stand, monkeypatch):
    monkeypatch.setattr(serve, "SERVE_LOOP_SECONDS", 0.01)
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    assert serve._watch(stand, stop, 60)


def test_servers_listen_where_the_trainer_reaches_them_and_leave_it_its_gpus(monkeypatch, tmp_path):
    made = {}

    def make_launcher(*args, **fields):
        made.update(fields)
        raise EngineStartError("enough")

    monkeypatch.setattr(serve, "resolve_model", Path)
    monkeypatch.setattr(serve, "make_launcher", make_launcher)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    with pytest.raises(ValueError, match="enough"):
        serve.serve(load_config(QUICKSTART), None, tmp_path, "127.0.0.1", 6, "a-token-of-the-tests-1234", None)
    assert made == {"num_ranks": 6, "host": "127.0.0.1", "token": "a-token-of-the-tests-1234"}


@pytest.mark.parametrize(
    ("words", "token", "message"),
    [
        ((), "", "rollout.token_file: servers for a remote trainer need its token; `openssl rand -hex 32` makes one"),
        ((), "short", "MEGAGRPO_TOKEN: a token must be one word of 16 or more characters"),
        (
            ("rollout.token_file=/nowhere/token",),
            "",
            "rollout.token_file: /nowhere/token cannot be read: No such file or directory",
        ),
        (
            ("--head", "127.0.0.1"),
            "a-token-of-the-tests-1234",
            "--head: 127.0.0.1 only applies to servers on several nodes",
        ),
        (("model.path=/nowhere",), "a-token-of-the-tests-1234", "model.path: /nowhere does not exist"),
    ],
)
def test_a_wrong_input_of_serve_is_named_before_torch_is_imported(words, token, message, tmp_path):
    code = (
        f"import sys; from megagrpo.__main__ import main; code = "
        f"main({['serve', str(QUICKSTART), '--urls', 'urls', *words]!r})\n"
    )
    code += "print(code, sorted({'torch', 'vllm', 'transformers', 'megatron', 'numpy'} & sys.modules.keys()))"
    own = {name: value for name, value in os.environ.items() if not name.startswith("MEGAGRPO_TOKEN")}
    own |= {"SLURMD_NODENAME": "n2"} | ({"MEGAGRPO_TOKEN": token} if token else {})
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True)
    assert ended.stdout == "2 []\n" and message in ended.stderr
    assert message in (tmp_path / "urls" / "n2.failed").read_text()


def test_the_command_line_of_serve():
    options = parse(["serve", str(QUICKSTART), "rollout.servers=2", "--urls", "u", "--reach", "h", "--first-gpu", "4"])
    assert (options.urls, options.reach, options.first_gpu, options.logs) == (Path("u"), "h", 4, Path())
    spanning = parse(["serve", str(QUICKSTART), "--head", "a:1,b:2", "--node", "3"])
    assert (spanning.head, spanning.node, options.head, options.node) == ("a:1,b:2", 3, None, None)


def test_a_server_that_cannot_start_ends_it_with_code_2_and_says_so_to_the_job(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # keeps pytest's handlers
    monkeypatch.setenv("MEGAGRPO_TOKEN", "a-token-of-the-tests-1234")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert main(["serve", str(QUICKSTART), "model.path=package:nowhere", "--urls", str(tmp_path)]) == 2
    assert "model.path: no installed package 'nowhere'" in capsys.readouterr().err
    assert "model.path: no installed package 'nowhere'" in (tmp_path / "n2.failed").read_text()


def test_it_gives_up_waiting_for_servers_when_asked_to_stop():
    stop = threading.Event()
    serve._progress("n1", stop, "waiting")
    stop.set()
    with pytest.raises(SystemExit) as ended:
        serve._progress("n1", stop, "waiting")
    assert ended.value.code == 0
