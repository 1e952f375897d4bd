"""The ranks of a command on one machine: their number, environment, signals and exit codes."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch.distributed.run  # noqa: F401  # once for all launchers, which are forks

from megagrpo.__main__ import main
from megagrpo.cluster.launch import local as module
from megagrpo.config import load_config

REPOSITORY = Path(__file__).parents[4]

RANK = """
import os, signal, sys, time
from pathlib import Path
rank = os.environ["RANK"]
def stop(signum, frame):
    time.sleep(0.5)  # a checkpoint takes a moment
    Path(sys.argv[1], f"saved-{rank}").write_text(str(signum))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
Path(sys.argv[1], f"pid-{rank}").write_text(str(os.getpid()))
if sys.argv[2] == "fail" and rank == "1":
    print("rank 1 says why", file=sys.stderr)
    sys.exit(7)
if sys.argv[2] != "end":
    time.sleep(60)
"""


@pytest.fixture
def local(monkeypatch):
    """The module megagrpo/cluster/launch/local.py, with all variables unset that affect ranks or threads."""
    for name in ("NPROC", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_ranks_are_those_of_one_model_copy_or_all_gpus_or_nproc(local, monkeypatch):
    config = load_config(REPOSITORY / "configs/quickstart.yaml", ["parallel.pp=6"])
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    assert local.num_ranks(config.rollout, config.parallel) == 6
    monkeypatch.setattr(local, "num_gpus", lambda: 8)
    assert local.num_ranks(config.rollout, config.parallel) == 8
    monkeypatch.setenv("NPROC", "4")
    assert local.num_ranks(config.rollout, config.parallel) == 4
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("NPROC", wrong)
        with pytest.raises(local.ConfigError, match=f"NPROC={wrong}"):
            local.num_ranks(config.rollout, config.parallel)


def test_dedicated_servers_have_gpus_that_no_rank_gets(local, monkeypatch):
    config = load_config(REPOSITORY / "configs/quickstart.yaml", ["rollout.placement=dedicated", "rollout.servers=3"])
    monkeypatch.setattr(local, "num_gpus", lambda: 8)
    assert local.num_ranks(config.rollout, config.parallel) == 5
    monkeypatch.setattr(local, "num_gpus", lambda: 3)
    with pytest.raises(
        local.ConfigError, match=r"rollout\.placement: dedicated servers need 3 GPUs, .* but this machine has 3"
    ):
        local.num_ranks(config.rollout, config.parallel)


def test_a_run_on_several_nodes_is_left_to_slurm(local, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert (
        main(["train", str(REPOSITORY / "configs/quickstart.yaml"), "run.nodes=2", "rollout.placement=dedicated"]) == 2
    )
    assert (
        "run.nodes: 2 nodes, but megagrpo train starts the ranks of one; use megagrpo submit" in capsys.readouterr().err
    )


def test_the_plan_of_several_ranks_is_checked_before_any_rank_starts(local, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("NPROC", "3")
    monkeypatch.setattr(local, "run_ranks", pytest.fail)
    assert main(["train", str(REPOSITORY / "configs/quickstart.yaml"), "parallel.pp=2"]) == 2
    assert "world_size: 3 is not a multiple" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["launch", "2", "train"]])
def test_train_starts_its_ranks_with_the_same_words(local, monkeypatch, words):
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setattr(
        local, "run_ranks", lambda ranks, command, nodes=None: started.append((ranks, nodes, command)) or 7
    )
    config = str(REPOSITORY / "configs/quickstart.yaml")
    assert main([*words, config, "run.seed=3", "--run.name=other", "--resume"]) == 7
    assert started == [(2, None, ["megagrpo", "train", config, "run.seed=3", "--run.name=other", "run.resume=true"])]


def test_gpus_are_counted_from_the_driver_or_from_what_is_visible(local, monkeypatch, tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf 'GPU 0: X (UUID: GPU-aaa)\\nGPU 1: X (UUID: GPU-bbb)\\n'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local.num_gpus() == 2
    counts = {"1": 1, "0,1": 2, "GPU-bbb": 1, "GPU-b, 0": 2, "0,-1,1": 1, "-1": 0, "NoDevFiles": 0, "2": 0} | {
        "GPU-ccc,0": 0
    }
    for visible, count in counts.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local.num_gpus() == count, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local.num_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert local.num_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # without a driver it selects nothing
    assert local.num_gpus() == 0


def test_cores_are_shared_out_and_what_the_user_set_stays(local, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    local.set_thread_environment(3)
    assert [os.environ[n] for n in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")] == ["2", "ACTIVE", "10000"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    local.set_thread_environment(100)
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("gpu", "overrides", "value"),
    [
        ("H100", ["parallel.tp=2"], "1"),
        ("H100", ["parallel.cp=2"], "1"),
        ("H100", ["parallel.pp=2"], None),
        ("B200", ["parallel.tp=2"], None),
        ("H100", ["parallel.tp=2", "parallel.ep=2", "train.overlap=[experts]", "model.precision=bf16"], None),
    ],
)
def test_ranks_that_overlap_messages_with_products_get_one_connection(gpu, overrides, value, local, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(local, "visible_gpu_lines", lambda environment: [f"GPU 0: NVIDIA {gpu}"])
    local.set_cuda_max_connections(load_config("megagrpo:quickstart", overrides))
    assert os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None) == value


def start(folder: Path, what: str) -> ForkProcess:
    """Two ranks of a stand-in trainer under the launcher's torchrun."""
    (folder / "stand_in.py").write_text(RANK)
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(folder, what))
    with warnings.catch_warnings():  # torch keeps two idle helper threads
        warnings.simplefilter("ignore", DeprecationWarning)
        launcher.start()
    return launcher


def asked(*name: str) -> None:
    raise AssertionError("a name server was asked, which may not respond")


def launch(folder: Path, what: str) -> None:
    socket.gethostbyaddr = asked
    os.environ["PET_NO_PYTHON"] = "1"  # of an operator of Kubernetes
    os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)
    os.environ["PYTHONPATH"] = f"{folder}:{REPOSITORY}"
    sys.exit(module.run_ranks(2, ["stand_in", str(folder), what]))


def finish(launcher: ForkProcess, folder: Path) -> tuple[int, str]:
    """The launcher's exit code, and the output of launcher and ranks."""
    launcher.join(60)
    code = launcher.exitcode
    launcher.kill()
    return code, (folder / "errors").read_text()


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_their_saving_is_waited_for(tmp_path, signum):
    launcher = start(tmp_path, "wait")
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    os.kill(launcher.pid, signum)
    code, errors = finish(launcher, tmp_path)
    assert code == 128 + signum and "Traceback" not in errors
    assert sorted(p.name for p in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert not [p for p in tmp_path.glob("pid-*") if alive(int(p.read_text()))]


def test_a_rank_that_fails_ends_the_others_and_gives_its_exit_code(tmp_path):
    code, errors = finish(start(tmp_path, "fail"), tmp_path)
    assert code == 7
    assert (
        "rank 1 says why" in errors and "rank 1 failed first, with exit code 7" in errors and "Traceback" not in errors
    )
    assert not [p for p in tmp_path.glob("pid-*") if alive(int(p.read_text()))]


def test_ranks_that_end_well_end_the_launcher_well(tmp_path):
    code, errors = finish(start(tmp_path, "end"), tmp_path)
    assert code == 0, errors


def test_a_wrong_config_ends_the_script_with_code_2_before_any_rank_starts():
    script = [
        str(REPOSITORY / "launch" / "local.sh"),
        str(REPOSITORY / "configs" / "quickstart.yaml"),
        "parallel.tpp=2",
    ]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "parallel.tpp: unknown key; did you mean parallel.tp?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_clone_without_an_environment_uses_the_activated_one_or_names_the_fix(tmp_path):
    script = tmp_path / "launch" / "local.sh"
    script.parent.mkdir()
    shutil.copy(REPOSITORY / "launch" / "local.sh", script)
    (tmp_path / "megagrpo").symlink_to(REPOSITORY / "megagrpo")
    bare = tmp_path / "bare" / "bin" / "python3"  # a Python without packages
    bare.parent.mkdir(parents=True)
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    environment = os.environ | {"PATH": f"{bare.parent}:{os.environ['PATH']}"}
    options = dict(capture_output=True, text=True, timeout=120, cwd=tmp_path)
    activated = subprocess.run([script, "no_file.yaml"], env=environment | {"VIRTUAL_ENV": sys.prefix}, **options)
    assert activated.returncode == 2 and "no_file.yaml" in activated.stderr, activated.stderr
    environment.pop("VIRTUAL_ENV", None)
    for more in ({}, {"VIRTUAL_ENV": str(bare.parents[1])}):
        ended = subprocess.run([script, "no_file.yaml"], env=environment | more, **options)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert f"lacks the packages of megagrpo, and {tmp_path} has no .venv; run launch/setup.sh" in ended.stderr


def test_ranks_of_another_command_are_started_without_torchruns_own_rendezvous(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(  # one write, which the other rank's cannot divide
        "import os, sys\nwords = [os.environ['RANK'], os.environ['MEGAGRPO_RENDEZVOUS'], *sys.argv[1:]]\n"
        "os.write(1, (' '.join(words) + '\\n').encode())\n"
    )
    launcher = [sys.executable, "-m", "megagrpo", "launch"]
    ended = subprocess.run([*launcher, "2", str(script), "--tp", "2"], capture_output=True, text=True, timeout=60)
    words = sorted(line.split() for line in ended.stdout.splitlines())
    assert ended.returncode == 0 and [(rank, *rest) for rank, _, *rest in words] == [
        ("0", "--tp", "2"),
        ("1", "--tp", "2"),
    ], ended.stderr
    assert len({folder for _, folder, *_ in words}) == 1 and not Path(words[0][1]).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: N, COMMAND"),
        (["2"], "the following arguments are required: COMMAND"),
        (["0", "verify", "x.yaml"], "N must be a positive number of ranks (got 0)"),
        (["two", "verify", "x.yaml"], "argument N: invalid int value: 'two'"),
        (["2", "plan", "x.yaml"], "plan runs in one process; leave out `launch 2`"),
        (["2", "verfy", "x.yaml"], "verfy is not a command; did you mean verify?"),
        (["2", "convert", "MODEL"], "megagrpo convert: the following arguments are required: OUT"),
    ],
)
def test_mistakes_in_launch_are_told_before_any_rank_starts(words, message, local, monkeypatch, capsys):
    monkeypatch.setattr(local, "run_ranks", pytest.fail)
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_page_and_no_program_uses_the_rendezvous_of_torch_that_unpickles():
    words = ["git", "grep", "-lE", "[r]dzv-backend=c10d|torchrun --(standalone|nproc)"]
    found = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    assert set(found) <= {"docs/security.md", "megagrpo/commands/launch.py"}  # both advise against it
