"""A rank ends with its torchrun, whenever torchrun is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megagrpo.platform.process.variables import LAUNCHER_VARIABLE
from tests.unit.engine.servers.test_launcher import wait_until, with_mark

REPOSITORY = Path(__file__).parents[4]
# A launcher that starts `python -m megagrpo train` as torchrun does, and sleeps. The rank's imports take seconds.
LAUNCHER = """
import os, subprocess, sys, time
os.environ.update(TORCHELASTIC_RUN_ID="run", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
os.environ.update({variables})
subprocess.Popen([sys.executable, "-u", "-m", "megagrpo", "train", sys.argv[1], "run.name=" + sys.argv[2]])
print("up", flush=True)
time.sleep(600)
"""
OWN_ID = "{" + f"'{LAUNCHER_VARIABLE}': str(os.getpid())" + "}"


@pytest.mark.parametrize(
    ("variables", "delays"), [(OWN_ID, (0.0, 0.02, 0.1)), ("{}", (None,))], ids=["our launcher", "torchrun itself"]
)
def test_a_rank_ends_when_torchrun_is_killed_while_it_imports(variables, delays, tmp_path):
    config = REPOSITORY / "configs" / "quickstart.yaml"
    for delay in delays:
        mark = f"mark{os.getpid()}x{time.monotonic_ns()}"
        code = LAUNCHER.format(variables=variables)
        command = [sys.executable, "-c", code, str(config), mark]
        launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            launcher.stdout.readline()
            wait_until(lambda mark=mark: len(with_mark(mark)) == 2)
            # the rank does not know torchrun's process id, so it must be alive when torchrun is killed
            if delay is None:
                wait_until(
                    lambda mark=mark: any(
                        "pydantic_core" in Path(f"/proc/{pid}/maps").read_text() for pid in with_mark(mark)
                    )
                )
            else:
                time.sleep(delay)
            launcher.kill()
            launcher.wait()
            wait_until(lambda mark=mark: not with_mark(mark), seconds=10)  # otherwise the rank imports, and trains
        finally:
            launcher.kill()
            for pid in with_mark(mark):
                os.kill(pid, signal.SIGKILL)
            launcher.wait()
