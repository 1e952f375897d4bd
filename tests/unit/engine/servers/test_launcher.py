"""The supervisor and the launcher around ordinary processes: no process outlives the process that started it."""

import asyncio
import http.server
import importlib.util
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import megagrpo.engine.servers.launcher as launcher_module
import megagrpo.engine.servers.supervisor as supervisor_module
from megagrpo.cluster.launch.node import wait_until_healthy
from megagrpo.config import RolloutSection, load_config
from megagrpo.engine.http.connections import MovedServers, answers, healthy
from megagrpo.engine.http.protocol import EngineStartError, derive_seed
from megagrpo.engine.http.server_calls import NoAnswer, Servers
from megagrpo.engine.servers import command_line
from megagrpo.engine.servers.launcher import Launcher, Server
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.serving import _check_place, make_launcher
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.platform.process import variables
from megagrpo.platform.process.cleanup.ownership import (
    CPU_WORKERS,
    FOLDER,
    SEGMENTS,
    TEMPORARY,
    make_folder,
    owner_in,
    remove_stale,
)
from tests.distributed.suites import usual
from tests.family_examples import RELEASES
from tests.unit.waiting import wait_until

SUPERVISOR = Path(supervisor_module.__file__)
# A server with a child that ignores SIGTERM and leaves its process group, and with an orphaned grandchild.
SERVER = """
import os, signal, subprocess, sys, time
stubborn = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn, "{mark}"])
subprocess.Popen(["bash", "-c", "sleep 601 {mark} & disown; exit 0"])
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, os, time
subprocess.Popen([sys.executable, "-I", "-S", {supervisor!r}, str(os.getpid()), "1", sys.executable, "-c", {server!r}, {mark!r}],
                 start_new_session=True)
time.sleep(600)
"""


def supervised(*words, grace=1) -> list[str]:
    """The command line of a supervisor below this process, with a server of these words."""
    return [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid()), str(grace), *map(str, words)]


def with_mark(mark):
    """Processes whose command line holds `mark`."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if mark.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    pids.append(int(entry))
            except OSError:
                pass
    return pids


@pytest.fixture
def family(tmp_path):
    """A stand-in for the trainer with a supervised server below it; (trainer, mark in every command line)."""
    mark = f"mark{os.getpid()}x{time.monotonic_ns()}"
    code = PARENT.format(supervisor=str(SUPERVISOR), server=SERVER.format(mark=mark), mark=mark)
    out = (tmp_path / "out").open("w+")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=out)
    wait_until(lambda: "up" in (tmp_path / "out").read_text())
    wait_until(lambda: len(with_mark(mark)) >= 4)
    yield parent, mark
    for pid in with_mark(mark):
        os.kill(pid, signal.SIGKILL)
    parent.kill()
    parent.wait()


@pytest.mark.parametrize("how", usual([signal.SIGKILL, signal.SIGTERM], 0))
def test_no_process_outlives_a_parent_that_is_killed(family, how):
    parent, mark = family
    parent.send_signal(how)
    parent.wait()
    wait_until(lambda: not with_mark(mark))


def test_a_supervisor_that_is_asked_to_stop_ends_every_descendant(family):
    parent, mark = family
    (supervisor,) = [
        pid
        for pid in with_mark(mark)
        if str(SUPERVISOR).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != parent.pid
    ]
    os.kill(supervisor, signal.SIGTERM)
    wait_until(lambda: [pid for pid in with_mark(mark) if pid != parent.pid] == [])


def test_a_supervisor_passes_on_how_its_server_ended():
    for code, expected in (("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)):
        assert subprocess.run(supervised("bash", "-c", code), timeout=20).returncode == expected


def test_a_server_that_outlives_its_engine_is_killed(tmp_path):
    impatient = (
        "import sys; from megagrpo.engine.servers import supervisor; supervisor.ENGINE_SECONDS = 1.0; "
        "sys.exit(supervisor.main())"
    )
    (tmp_path / "engine.sh").write_text("exec -a vllm::EngineCore sleep 1.5")
    server = f"bash {tmp_path}/engine.sh & sleep 60"
    command = [sys.executable, "-c", impatient, str(os.getpid()), "1", "bash", "-c", server]
    ended = subprocess.run(command, timeout=20, capture_output=True, text=True)
    assert (
        ended.returncode == supervisor_module.ENGINE_ENDED
        and "the engine has ended and the API server has not exited" in ended.stdout
    )


SAYS_WHERE = (
    "import os, tempfile, time; open(tempfile.mkstemp()[1]).close(); print(tempfile.gettempdir(), flush=True); "
    "time.sleep({})"
)


@pytest.mark.parametrize("seconds", [0, 60], ids=["ends", "is stopped"])
def test_what_a_server_leaves_among_temporary_files_goes_with_it(seconds):
    with tempfile.TemporaryDirectory() as around:
        command = supervised(sys.executable, "-c", SAYS_WHERE.format(seconds))
        supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": around}, text=True)
        folder = Path(supervisor.stdout.readline().strip())
        assert folder.parent == Path(around) and (not seconds or list(folder.iterdir()))
        supervisor.terminate()
        supervisor.wait(20)
        assert not list(Path(around).iterdir())


def test_a_server_whose_sockets_would_have_too_long_names_has_its_temporary_files_elsewhere(tmp_path):
    around = tmp_path / ("long" * 20)
    around.mkdir()
    command = supervised(sys.executable, "-c", SAYS_WHERE.format(0))
    said = subprocess.run(
        command, capture_output=True, env={**os.environ, "TMPDIR": str(around)}, text=True, timeout=20
    ).stdout.strip()
    assert Path(said).parent == Path("/tmp") and not Path(said).exists()


TRAINER = (
    "import os, subprocess, sys, tempfile, time\nfrom megagrpo.platform.process.cleanup.scratch import "
    "temporary_files\nwith temporary_files() as folder:\n"
)
TRAINER += (
    "    tempfile.mkstemp(); subprocess.Popen(sys.argv[1:4] + [str(os.getpid()), '1', 'sleep', '60']); "
    "time.sleep(0.3)\n"
)
TRAINER += "    print(folder, flush=True); time.sleep(60)"


def test_what_a_killed_trainer_leaves_among_temporary_files_goes_with_its_server():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as around:
        command = [sys.executable, "-c", TRAINER, sys.executable, "-S", str(SUPERVISOR)]
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": around}, text=True)
        folder = Path(trainer.stdout.readline().strip())
        assert folder.parent == Path(around)
        wait_until(lambda: list(folder.glob("vllm-*")))
        subprocess.run(
            [sys.executable, "-c", "import os\nfor _ in range(1100):\n    os.mkdir('a'); os.chdir('a')"],
            cwd=folder,
            check=True,
        )
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not list(Path(around).iterdir()))


def test_files_that_a_killed_server_had_mapped_are_removed():
    name = Path(f"/dev/shm/psm_test{os.getpid()}")
    code = (
        f"import mmap, time; f = open({str(name)!r}, 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 0); "
        "print('up', flush=True); "
    )
    code += "time.sleep(60)"
    command = supervised(sys.executable, "-c", code)
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE)
    supervisor.stdout.readline()
    assert name.exists()
    supervisor.terminate()
    supervisor.wait(20)
    assert not name.exists()


AFTER_SIGTERM = """
import mmap, os, signal, sys, time
def later(*_):
    if os.fork() == 0:
        os.setsid()
    for name in sys.argv[1:]:
        with open(name.format(os.getpid()), "w+b") as file:
            file.truncate(4096)
            kept.append(mmap.mmap(file.fileno(), 0))
    print("made", flush=True)
    time.sleep(600)
kept = []
signal.signal(signal.SIGTERM, later)
print("up", flush=True)
time.sleep(600)
"""
NAMED_AFTER_SIGTERM = """
import os, signal, time
from megagrpo.platform.process.cleanup.ownership import SEGMENTS, owned
def later(*_):
    open("/dev/shm/" + owned(SEGMENTS), "w").close()
    print(owned(SEGMENTS), flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, later)
print("up", flush=True)
time.sleep(600)
"""


def end_after_sigterm(grace: int, code: str, *words: str) -> str:
    """What a supervised server printed after the supervisor was asked to stop; the supervisor has ended."""
    command = supervised(sys.executable, "-c", code, *words, grace=grace)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout.readline() == "up\n"
        supervisor.terminate()
        return supervisor.stdout.read()


def test_files_that_a_starting_server_makes_after_sigterm_are_removed():
    names = [f"/dev/shm/{kind}_late{os.getpid()}_{{}}" for kind in ("psm", "vllm_offload")]
    end_after_sigterm(2, AFTER_SIGTERM, *names)
    assert not list(Path("/dev/shm").glob(f"*_late{os.getpid()}_*"))


def test_segments_that_a_starting_server_makes_after_sigterm_are_removed_without_being_mapped():
    owner = end_after_sigterm(20, NAMED_AFTER_SIGTERM).removeprefix(SEGMENTS).partition("-")[0]
    assert owner and not list(Path("/dev/shm").glob(f"*{owner}*"))


def test_files_that_a_server_maps_and_that_are_not_only_its_own_stay(tmp_path):
    """A file that another process maps, a file of another user, and a file behind the name that was replaced
    meanwhile."""
    shared, theirs, replaced = (Path(f"/dev/shm/psm_{name}{os.getpid()}") for name in ("shared", "theirs", "replaced"))
    kept = [
        mmap.mmap(os.open(path, os.O_CREAT | os.O_RDWR), 0)
        for path in (shared, theirs, replaced)
        if path.write_bytes(bytes(4096))
    ]
    for other in kept[1:]:
        other.close()
    if os.getuid() == 0:
        os.chown(theirs, 65534, 65534)
    code = (
        "import mmap, os, sys, time; kept = [mmap.mmap(os.open(name, os.O_RDWR), 0) for name in sys.argv[1:]]; "
        "print('up', flush=True); "
    )
    command = supervised(sys.executable, "-c", code + "time.sleep(60)")
    supervisor = subprocess.Popen([*command, shared, theirs, replaced], stdout=subprocess.PIPE)
    try:
        supervisor.stdout.readline()
        replaced.unlink()
        replaced.symlink_to(tmp_path)
        supervisor.terminate()
        supervisor.wait(20)
        assert shared.exists() and replaced.is_symlink() and (theirs.exists() or os.getuid() != 0)
    finally:
        for path in (shared, theirs, replaced):
            path.unlink(missing_ok=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a child with another user's rights")
def test_a_child_with_another_users_rights_does_not_keep_the_supervisor():
    """Such as sudo, which the supervisor's user may not signal."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            server = subprocess.Popen(["true"])
            server.wait()
            if os.fork() == 0:
                os.close(write)
                os.read(read, 1)  # until the test has ended
                os._exit(0)
            os.setuid(65534)
            supervisor_module.end(server, 0.1, {})
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitpid(pid, 0)[1]
    os.close(write)
    os.close(read)
    assert ended == 0


def test_a_supervisor_leaves_the_temporary_files_of_a_process_that_lives(tmp_path):
    """The launcher's folder is its ranks' temporary directory: a rank's supervisor must not take it when only the rank
    has ended."""
    folder, lock = make_folder(TEMPORARY, tmp_path)
    command = [sys.executable, "-S", str(SUPERVISOR), "1", "1", "true"]  # its parent is not process 1
    subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, timeout=20)
    assert folder.exists()
    os.close(lock)
    subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, timeout=20)
    assert not folder.exists()


def test_files_that_a_server_had_mapped_which_is_killed_soon_are_removed():
    name = Path(f"/dev/shm/psm_soon{os.getpid()}")
    code = (
        f"import mmap, os, time; f = open({str(name)!r}, 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 0); "
        "time.sleep(1.6); "
    )
    code += "os.kill(os.getpid(), 9)"
    command = supervised(sys.executable, "-c", code)
    assert subprocess.run(command, timeout=20).returncode == 128 + signal.SIGKILL and not name.exists()


def test_segments_of_a_process_that_was_killed_are_removed_at_the_next_start_and_no_others():
    code = "import sys, time; from multiprocessing import resource_tracker, shared_memory; "
    code += "from megagrpo.platform.process.cleanup.ownership import name_segments_by_owner; name_segments_by_owner(); "
    code += "resource_tracker.register = lambda *_: None; "  # as if the tracker was killed
    code += "print(shared_memory.SharedMemory(create=True, size=64).name, flush=True); time.sleep(60)"
    made = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    files = [Path("/dev/shm", process.stdout.readline().strip()) for process in made]
    try:
        assert [file.name.split(".")[0] for file in files] == [f"{SEGMENTS}{process.pid}" for process in made]
        made[0].kill()
        made[0].wait()
        assert all(file.exists() for file in files)
        remove_stale()
        assert [file.exists() for file in files] == [False, True]
    finally:
        for process, file in zip(made, files, strict=True):
            process.kill()
            process.wait()
            file.unlink(missing_ok=True)


def test_files_of_cpu_workers_are_removed_when_their_engine_has_ended_and_no_others(tmp_path):
    code = "import sys, time; from pathlib import Path; from megagrpo.platform.process.cleanup.ownership import make_folder; "
    code += f"print(make_folder({FOLDER!r}, Path(sys.argv[1]))[0].name, flush=True); time.sleep(60)"
    engine, other = (
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    owners = [owner_in(process.stdout.readline().strip(), FOLDER) for process in (engine, other)]
    files = [tmp_path / f"{CPU_WORKERS}{owner}-1a2b3c4d-tp:0-[0-1]-cpushm_0" for owner in owners]
    files.append(tmp_path / "vllm_dist_5e6f-tp:0-[0-1]-cpushm_0")  # belongs to another program
    for file in files:
        file.write_bytes(bytes(4096))
    remove_stale(tmp_path)
    assert all(file.exists() for file in files)
    engine.kill()
    os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)  # the engine is a zombie now
    remove_stale(tmp_path)
    assert [file.exists() for file in files] == [False, True, True]
    for process in (engine, other):
        process.kill()
        process.wait()


@pytest.fixture
def options(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return ServerOptions(str(tmp_path), "float32", 64)


def test_a_taken_port_is_named_before_anything_starts(options, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        launcher = Launcher(options, tmp_path, port=port)
        with pytest.raises(EngineStartError, match=f"rollout.port: {port} cannot be used .*or 0 to pick a free one"):
            launcher.start()
    assert launcher.servers == []


def test_an_address_that_this_machine_does_not_have_is_an_error(options, tmp_path):
    launcher = Launcher(options, tmp_path, host="203.0.113.1", num_servers=2)
    with pytest.raises(
        EngineStartError, match=r"rollout\.port: 2 free ports needed on 203\.0\.113\.1, 0 found \(.*requested address"
    ):
        launcher.start()
    assert launcher.servers == []


def test_a_folder_without_a_model_is_refused_at_once(tmp_path):
    with pytest.raises(EngineStartError, match=r"holds no config\.json"):
        Launcher(ServerOptions(str(tmp_path / "nowhere"), "float32", 64), tmp_path).start()


def test_a_machine_without_vllm_names_the_command_that_installs_it(options, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    launcher = Launcher(options, tmp_path)
    with pytest.raises(EngineStartError, match=f"vLLM is not installed for {sys.executable}; run `megagrpo install`"):
        launcher.start()
    assert launcher.servers == []


LOG = """\
(Worker pid=7) INFO 11-21 20:59:24 [parallel_state.py:1906] world_size=1
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953]   File "qwen2.py", line 352, in __init__
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953]     assert windows
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953] AssertionError: windows are
(Worker pid=7) ERROR 11-21 20:59:24 [multiproc_executor.py:953] not supported
(EngineCore pid=6) ERROR 11-21 20:59:25 [core.py:1510] EngineCore failed to start.
(EngineCore pid=6) ERROR 11-21 20:59:25 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=6) ERROR 11-21 20:59:25 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=6) ERROR 11-21 20:59:25 [core.py:1510] Exception: WorkerProc initialization failed. See stack trace for root cause.
Traceback (most recent call last):
  File "entry.py", line 95, in build
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "cause"), [(LOG, "AssertionError: windows are not supported"), (LOG[LOG.index("\nTraceback") :], "")]
)
def test_why_a_server_did_not_start_is_what_failed_first(log, cause, tmp_path):
    (tmp_path / "log").write_text(log)
    assert Server("http://here", tmp_path / "log", None).cause() == cause


class Starting(Launcher):
    """Servers that do `initially` at their first start and `later` at every other start; `well` responds."""

    initially, later = "kill -KILL $$", "kill -KILL $$"
    well = f"exec {sys.executable} -m http.server --bind 127.0.0.1 --directory {{folder}} {{port}}"

    def _command(self, port):
        code = self.later if self.restarts.total() else self.initially
        (self.log_dir / "health").touch()
        return ["bash", "-c", code.format(folder=self.log_dir, port=port)]


def test_a_server_that_is_killed_while_it_starts_is_started_again(options, tmp_path):
    said = []
    with Starting(options, tmp_path, num_servers=2, max_restarts=1) as launcher:
        launcher.later = launcher.well
        launcher.start()
        assert launcher.wait(said.append) == launcher.urls and all(map(launcher_module.healthy, launcher.urls))
    killed = [
        line for line in said if "was killed by SIGKILL; restarting it, 1 of 1 times (rollout.max_restarts)" in line
    ]
    assert len(killed) == 2 and all(line.startswith("warning: vLLM server http://127.0.0.1:") for line in killed)


def test_a_server_whose_port_was_taken_restarts_at_a_fresh_port_and_clients_follow(options, tmp_path):
    file = tmp_path / "moved.json"
    with Starting(options, tmp_path, max_restarts=2, moved=MovedServers(file)) as launcher:
        launcher.initially = launcher.later = launcher.well
        launcher.start()
        (url,) = launcher.wait()
        client = Servers([url], moved=MovedServers(file))  # on another rank
        launcher.servers[0].supervisor.kill()
        launcher.servers[0].supervisor.wait()
        port = int(url.rpartition(":")[2])
        wait_until(lambda: launcher_module.is_free(launcher.host, port))
        with socket.socket() as taken, ThreadPoolExecutor(1) as side:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((launcher.host, port))
            taken.listen()
            sent = side.submit(
                lambda: asyncio.run(client._each(lambda *where: client._request(*where, "/pause", seconds=60), [url]))
            )
            with taken.accept()[0]:  # by a process that never responds
                line = launcher.restart(0)
                with pytest.raises(NoAnswer, match=r"did not respond to /pause: .*was restarted on another port"):
                    sent.result(20)
            address = launcher.servers[0].address
            assert launcher.urls == [url] != [address]
            fresh = address.rpartition(":")[2]
            assert (
                f"{url} was killed by SIGKILL, and another process took its port (new port {fresh}); restarting it"
                in line
            )
            wait_until(lambda: launcher_module.healthy(address))
            assert asyncio.run(client._each(answers, client.urls)) == [True]
        launcher.servers[0].end()
        launcher.restart(0)  # the port is free again
        assert launcher.servers[0].address == url
        wait_until(lambda: launcher_module.healthy(url))
        assert asyncio.run(client._each(answers, client.urls)) == [True]
    assert not file.exists()


@pytest.mark.parametrize(
    ("first", "restarts", "ending"),
    [
        ("kill -KILL $$", 2, "was killed by SIGKILL after"),
        ("exit 3", 0, "ended with exit code 3 after"),
        pytest.param(
            'name=Core; bash -c "exec -a vllm::Engine$name sleep 2" & sleep 60',
            0,
            "was killed because its engine had ended after",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_server_that_is_killed_too_often_or_ends_by_itself_while_it_starts_is_given_up(
    first, restarts, ending, options, tmp_path
):
    with Starting(options, tmp_path, max_restarts=2) as launcher:
        launcher.initially = first
        launcher.start()
        with pytest.raises(EngineStartError, match=f"vLLM server .* {ending}"):
            launcher.wait()
        assert launcher.restarts.total() == restarts and launcher.servers == []


def test_too_few_gpus_for_the_servers_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.servers 2 x rollout\.tp 1 need 2 GPUs; 1 were given"):
        Launcher(options, tmp_path, num_servers=2, devices=["0"])


def test_each_server_gets_its_own_gpus(tmp_path):
    launcher = Launcher(
        ServerOptions(str(tmp_path), "bfloat16", 64, tp=2), tmp_path, num_servers=2, devices=["0", "1", "4", "5"]
    )
    assert [launcher._environment(i)["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["0,1", "4,5"]
    assert "-m" in launcher._command(1234)


def test_a_deterministic_server_on_a_gpu_computes_requests_apart_from_each_other(tmp_path):
    asked, plain = (
        ServerOptions(str(tmp_path), "bfloat16", 64, deterministic=deterministic) for deterministic in (True, False)
    )
    assert Launcher(asked, tmp_path, devices=["0"])._environment(0)["VLLM_BATCH_INVARIANT"] == "1"
    assert "VLLM_BATCH_INVARIANT" not in Launcher(plain, tmp_path, devices=["0"])._environment(0)
    assert "VLLM_BATCH_INVARIANT" not in Launcher(asked, tmp_path)._environment(0)  # vLLM for CPU has no such kernels


def test_experts_are_shared_out_whole_when_that_is_asked_for(tmp_path):
    commands = [
        Launcher(ServerOptions(str(tmp_path), "float32", 64, tp=2, expert_parallel=e), tmp_path)._command(1)
        for e in (False, True)
    ]
    assert ["--enable-expert-parallel" in command for command in commands] == [False, True]


def test_a_familys_flags_join_those_of_packed_files(tmp_path):
    flags = {"--hf-overrides": {"llama_4_scaling": {"beta": 0.1}}, "--override-generation-config": {"key": False}}
    options = ServerOptions(str(tmp_path), "float32", 64, family_flags=flags, packed=True)
    command = Launcher(options, tmp_path)._command(1)
    found = {flag: json.loads(command[command.index(flag) + 1]) for flag in flags}
    assert found == flags | {"--hf-overrides": flags["--hf-overrides"] | {"quantization_config": None}}
    assert command.count("--hf-overrides") == 1
    inside = replace(options, packed_text=True, family_flags={"--hf-overrides": {"text_config": {"scale": 2}}})
    command = Launcher(inside, tmp_path)._command(1)
    found = json.loads(command[command.index("--hf-overrides") + 1])
    assert found == {"text_config": {"scale": 2, "quantization_config": None}}


def test_the_parameters_of_xielu_need_servers_in_bfloat16(tmp_path):
    model = parse_hf_config(RELEASES["apertus"])
    place = RolloutSection(), tmp_path, model
    _check_place(*place, "bfloat16", False, None)
    with pytest.raises(
        ValueError, match=r"keeps the parameters of xIELU \(apertus\) in bfloat16, not in float32; set it"
    ):
        _check_place(*place, "float32", False, None)


def test_a_server_does_not_inherit_the_ranks_of_its_launcher(options, tmp_path, monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(key, "3")
    env = Launcher(options, tmp_path)._environment(0)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(env)


def test_seeds_depend_on_every_part_and_never_change():
    assert derive_seed(42, 0, 1) == 112464216604333215
    seeds = {derive_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_server_without_a_gpu_gets_memory_in_large_pages_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    launcher = Launcher(ServerOptions("model", "float32", 64), tmp_path)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert list(launcher._environment(0).items())[-1] == ("GLIBC_TUNABLES", variables.MALLOC)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert launcher._environment(0)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"


def test_a_server_that_does_not_answer_in_time_ends_the_start_with_the_key(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = load_config(Path(__file__).parents[4] / "configs" / "quickstart.yaml", ["rollout.startup_timeout=0.5"])
    with make_launcher(settings, tmp_path, tmp_path / "logs", "float32") as launcher:
        launcher.start()
        with pytest.raises(EngineStartError, match=r"did not respond within 0 s \(rollout\.startup_timeout\)"):
            launcher.wait()
        assert launcher.servers == []


def test_variables_of_the_trainers_gpus_do_not_reach_a_server(tmp_path, monkeypatch):
    ours = (
        "CUDA_DEVICE_MAX_CONNECTIONS NCCL_ALGO CUBLAS_WORKSPACE_CONFIG NVTE_ALLOW_NONDETERMINISTIC_ALGO OMP_NUM_THREADS"
    )
    ours = ours.split()
    for name in (*ours, "NCCL_DEBUG"):
        monkeypatch.setenv(name, "1")
    environment = Launcher(ServerOptions(str(tmp_path), "bfloat16", 64), tmp_path, devices=["0"])._environment(0)
    assert not environment.keys() & {*ours} and environment["NCCL_DEBUG"] == "1"


def test_what_the_run_sets_for_its_servers_replaces_what_the_user_set(options, tmp_path, monkeypatch):
    names = "VLLM_HOST_IP VLLM_PLUGINS VLLM_SERVER_DEV_MODE GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME VLLM_API_KEY"
    for name in names.split():
        monkeypatch.setenv(name, "theirs")
    environment = Launcher(options, tmp_path)._environment(0)
    assert "theirs" not in environment.values() and environment["VLLM_HOST_IP"] == "127.0.0.1"
    elsewhere = Launcher(options, tmp_path, host="10.0.0.1")._environment(0)
    # for weights from other hosts
    assert elsewhere["GLOO_SOCKET_IFNAME"] == elsewhere["NCCL_SOCKET_IFNAME"] == "theirs"


def test_a_health_check_uses_no_proxy(monkeypatch):
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9" if name.lower() == "all_proxy" else "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert healthy(url) and wait_until_healthy([url], 0.1) == []
        server.shutdown()


def test_only_a_server_that_sleeps_on_a_gpu_gets_the_flags_of_sleep(tmp_path):
    commands = {}
    for devices, sleep in ((["0"], True), (["0"], False), (None, True)):
        options = ServerOptions(str(tmp_path), "bfloat16", 64, sleep_mode=sleep)
        command = Launcher(options, tmp_path, devices=devices)._command(8000)
        commands[bool(devices), sleep] = [word for word in command if word in command_line.SLEEP_FLAGS]
    assert commands.pop((True, True)) == list(command_line.SLEEP_FLAGS) and not any(commands.values())


def test_the_installed_vllm_knows_the_flags_of_sleep():
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    assert all(f'"{flag}"' in source for flag in command_line.SLEEP_FLAGS)
