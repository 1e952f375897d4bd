"""Starts a vLLM process before its server is known: it imports vLLM while the trainer imports its own packages.

The process waits under its supervisor until the launcher hands it the command line and the log of the first server.
Without a GPU only, where one process imports vLLM for all processes of a server (`sync/vllm_side/vllm_main.py`). A
process whose environment turns out to be wrong for the server, or that no server takes, is ended.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megagrpo.config import RunConfig
from megagrpo.engine.servers.command_line import PLUGIN, server_environment
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.supervisor import GRACE_SECONDS, supervise
from megagrpo.platform.process.hand_over import line_of, send
from megagrpo.platform.process.loopback import LOOPBACK

PROGRAM = [sys.executable, str(PLUGIN / "vllm_main.py")]
WAIT = "--wait"  # the argument of a process that waits; sync/vllm_side/vllm_main.py has a copy


class _Waiting(NamedTuple):
    """A supervised process that waits for its server, its environment, the file with its output so far, and the process
    that started it."""

    supervisor: subprocess.Popen[bytes]
    environment: dict[str, str]
    output: Path
    owner: int


_waiting: list[_Waiting] = []


def begin(config: RunConfig) -> None:
    """Start the process for a run of one rank without a GPU, unless the run starts no server on this host's loopback
    interface."""
    r = config.rollout
    local = not r.urls and r.urls_file is None and r.nodes_per_server == 1 and r.interface == LOOPBACK
    if not local or importlib.util.find_spec("vllm") is None:
        return
    lora_rank = config.lora.rank if config.lora.syncs_adapters else 0
    options = ServerOptions("", "", 0, tp=r.tp, pp=r.pp, dp=r.dp, kv_cache_gb=r.kv_cache_gb, lora_rank=lora_rank)
    environment = server_environment(options, None, r.servers * options.devices, loopback=True, guarded=True)
    output = Path(tempfile.mkdtemp(prefix="vllm_early_"), "output.log")
    with output.open("wb") as out:
        supervisor = supervise([*PROGRAM, WAIT], environment, out, token=None)
    _waiting.append(_Waiting(supervisor, environment, output, os.getpid()))
    atexit.register(_end)


def take(
    command: Sequence[str], environment: dict[str, str], log: Path, token: bytes
) -> subprocess.Popen[bytes] | None:
    """Hand the waiting process the command and the token of a server, and return its supervisor. Return None without a
    process for this environment. The output so far and all later output go to the end of `log`."""
    if not _waiting:
        return None
    supervisor, expected, output, _ = _waiting[0]
    if supervisor.poll() is not None or expected != environment or list(command[: len(PROGRAM)]) != PROGRAM:
        _end()
        return None
    _waiting.clear()
    with output.open("rb") as source, log.open("ab") as out:
        shutil.copyfileobj(source, out)
    server = {"arguments": [*command[len(PROGRAM) :]], "log": str(log.absolute()), "token": token.decode()}
    send(line_of(server), supervisor.stdin)
    return supervisor


def _end() -> None:
    """End the process that no server has taken."""
    for supervisor, _, _, owner in _waiting:
        if owner == os.getpid():  # not in a fork
            supervisor.terminate()
            supervisor.wait(GRACE_SECONDS + 5)
    _waiting.clear()
