"""Starts a vLLM process before its server is known: it imports vLLM while the trainer imports its own packages.

The process waits under its supervisor for one line with the arguments, the log and the token of the first server. This
is for machines without a GPU, where one process imports vLLM for all processes of a server
(`sync/vllm_side/vllm_main.py`). A process that no server takes is ended.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megagrpo.config import RolloutSection
from megagrpo.engine.servers.command_line import PLUGIN, server_environment
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.supervisor import SERVER_GRACE_SECONDS, give, supervise
from megagrpo.loopback import LOOPBACK

PROGRAM = [sys.executable, str(PLUGIN / "vllm_main.py")]
WAIT = "--wait"  # the argument of a process that waits; sync/vllm_side/vllm_main.py has a copy


class Waiting(NamedTuple):
    """A process that waits for its server: its supervisor, its environment, its output so far, and its parent's id."""

    supervisor: subprocess.Popen[bytes]
    environment: dict[str, str]
    output: Path
    parent: int


_waiting: list[Waiting] = []


def begin(rollout: RolloutSection, lora_rank: int) -> None:
    """Start the process, unless the run starts no server on this host's loopback interface. `lora_rank` is the rank of
    the adapters that weight syncs send, 0 without."""
    r = rollout
    local = not r.urls and r.urls_file is None and r.nodes_per_server == 1 and r.interface == LOOPBACK
    if not local or importlib.util.find_spec("vllm") is None:
        return
    options = ServerOptions("", "", 0, tp=r.tp, pp=r.pp, dp=r.dp, kv_cache_gb=r.kv_cache_gb, lora_rank=lora_rank)
    environment = server_environment(options, None, r.servers * options.devices, loopback=True, guarded=True)
    output = Path(tempfile.mkdtemp(prefix="vllm_early_"), "output.log")
    with output.open("wb") as out:
        supervisor = supervise([*PROGRAM, WAIT], environment, out)
    _waiting.append(Waiting(supervisor, environment, output, os.getpid()))
    atexit.register(_end)


def take(command: Sequence[str], environment: dict[str, str], log: Path, token: str) -> subprocess.Popen[bytes] | None:
    """Give the waiting process a server, and return its supervisor; None without a process for this environment. Its
    output so far and all later output go to the end of `log`."""
    if not _waiting:
        return None
    supervisor, expected, output, _ = _waiting[0]
    if supervisor.poll() is not None or expected != environment or list(command[: len(PROGRAM)]) != PROGRAM:
        _end()
        return None
    _waiting.clear()
    with output.open("rb") as source, log.open("ab") as out:
        shutil.copyfileobj(source, out)
    server = {"arguments": [*command[len(PROGRAM) :]], "log": str(log.absolute()), "token": token}
    give(supervisor, json.dumps(server) + "\n")
    return supervisor


def _end() -> None:
    """End the process that no server has taken."""
    for supervisor, _, _, parent in _waiting:
        if parent == os.getpid():  # not in a fork
            supervisor.terminate()
            supervisor.wait(SERVER_GRACE_SECONDS + 5)
    _waiting.clear()
