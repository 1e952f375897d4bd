"""Other users of the machine cannot read a run: its folder, logs and shared memory have no rights for them."""

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from megagrpo.cluster.launch import preflight
from megagrpo.cluster.launch.node import RankLogs
from megagrpo.commands.api.inputs.call_inputs import collect
from megagrpo.config import load_config
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.records.checkpoints.run_lock import RunLock
from megagrpo.records.rows.jsonl_file import JsonlFile
from megagrpo.sync.trainer_side.shared_memory import SharedMemory
from megagrpo.trainer.saving.run_folder import prepare_run_folder
from tests.unit.sync.trainer_side.test_verification import OneRank

NOBODY = 65534
UMASKS = {0o022: 0o750, 0o002: 0o770, 0o077: 0o700, 0o000: 0o770}


@pytest.fixture
def around():
    """A folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def prepare_servers(folder: Path) -> None:
    with Launcher(ServerOptions("m", "float32", 64), folder) as launcher:
        launcher._prepare()


def reward(completions, **columns):
    return [0.0] * len(completions)


def start(folder: Path) -> None:
    """Begin a run in `folder`, with metrics."""
    config = load_config("megagrpo:quickstart", [f"run.output_dir={folder.parent}", f"run.name={folder.name}"])
    prepare_run_folder(config, RunLock(folder))
    metrics = JsonlFile(folder / "metrics.jsonl", 0)
    metrics.append([{"step": 1}])
    metrics.close()
    collect(reward, [{"prompt": "secret"}], None, None).write(folder)


CREATORS = {
    "a run": start,
    "functions and data from Python": lambda folder: collect(reward, [{"prompt": "secret"}], None, None).write(folder),
    "the preflight of a node": lambda folder: preflight.node_problems(folder, 0, [], {}),
    "logs of servers": prepare_servers,
    "logs of ranks": lambda folder: RankLogs(folder).reify({}),
}


@pytest.mark.parametrize("umask", UMASKS, indirect=True, ids=oct)
@pytest.mark.parametrize("creator", CREATORS)
def test_a_folder_has_no_rights_for_other_users_and_those_of_the_umask_for_the_group(creator, umask, tmp_path):
    CREATORS[creator](tmp_path / "runs" / "mine")
    assert mode(tmp_path / "runs" / "mine") == UMASKS[umask]
    assert mode(tmp_path / "runs") == 0o777 & ~umask  # only the run is private
    for inside in tmp_path.glob("runs/mine/from_python/*"):
        assert mode(inside) == 0o777 & ~umask


@pytest.mark.parametrize("umask", [0o022], indirect=True)
def test_a_folder_that_exists_keeps_its_rights(umask, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    start(tmp_path / "mine")
    assert mode(tmp_path / "mine") == 0o755


def read_as(user: int, group: int, folder: Path) -> set[str]:
    """The files of `folder` that a user can read."""
    command = ["find", str(folder), "-type", "f", "-readable"]
    ran = subprocess.run(command, user=user, group=group, extra_groups=[], capture_output=True, text=True, cwd="/")
    return {Path(line).name for line in ran.stdout.splitlines()}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("umask", [0o022], indirect=True)
def test_another_user_reads_a_run_only_in_its_group_or_when_shared(umask, around):
    folder = around / "runs" / "mine"
    start(folder)
    everything = {"resolved.yaml", "metrics.jsonl", "train.jsonl"}
    assert read_as(NOBODY, NOBODY, around) == set()
    assert everything <= read_as(NOBODY, os.getgid(), around)
    folder.chmod(0o755)  # as docs/security.md says
    assert everything <= read_as(NOBODY, NOBODY, around)
    shutil.rmtree(folder)
    os.umask(0o077)
    start(folder)
    assert read_as(NOBODY, os.getgid(), around) == set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("umask", [0o000], indirect=True)
def test_no_other_user_reads_weights_in_shared_memory(umask, around):
    shared = SharedMemory(OneRank(), "float32", folder=around)
    try:
        (shared.folder / "adapter1").mkdir()
        (shared.folder / "adapter1" / "adapter_model.safetensors").write_text("weights")
        assert mode(shared.folder) == 0o700 and read_as(NOBODY, os.getgid(), around) == set()
    finally:
        shared.close()
    assert list(around.iterdir()) == []
