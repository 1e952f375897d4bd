"""Tries parts of requests before the start, as vLLM does when it gets them, in a process that can be killed."""

from __future__ import annotations

import functools
import json
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagrpo.platform.process.environment import inherited
from megagrpo.platform.process.variables import ENVIRONMENT

CHILD = Path(__file__).parents[2] / "sync" / "vllm_side" / "trial" / "request_trial_child.py"
CPU_SECONDS, MEMORY, WALL_SECONDS = 10, 3 * 2**30, 120  # of one request; memory besides that of the imports
START_SECONDS = 300  # of the imports of vLLM
MOST_BYTES = 2**20  # of a constraint: every request carries it


class RequestTrial:
    """A process that tries one request after the other. It starts with the first one and ends with this process.
    `vllm_version` is the version that judges: None before the first request, "" without vLLM. Not thread-safe."""

    def __init__(self, cpu_seconds: int = CPU_SECONDS, memory: int = MEMORY, wall_seconds: float = WALL_SECONDS):
        self.vllm_version: str | None = None
        self._limits, self._wall_seconds = {"seconds": cpu_seconds, "bytes": memory}, wall_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self, request: Mapping[str, Any]) -> str | None:
        """Return why vLLM would refuse a request, and the fix; None for a valid one.

        `request` is a constraint, {kind: text}, or {parser, tools, tokenizer}. Raises ValueError if the process does
        not start."""
        line = json.dumps(request).encode() + b"\n"
        if len(line) > MOST_BYTES:
            return f"has {len(line)} bytes, and the limit is {MOST_BYTES}; shorten it"
        for attempt in range(2):
            process = self._started()
            if answer := self._asked(process, line):
                reason, is_used_up = json.loads(answer)
                if is_used_up:
                    self.close()
                return reason
            self.close()
            # the kernel may have killed it for the memory of another process
            if answer is None or process.returncode != -signal.SIGKILL or attempt:
                break
        limits = f"{self._limits['seconds']} s of CPU time and {self._limits['bytes'] >> 20} MiB"
        return f"cannot be compiled within {limits} (exit code {process.returncode}); simplify or shorten it"

    def _asked(self, process: subprocess.Popen[bytes], line: bytes) -> bytes | None:
        """Return the answer to a request; empty if the process has ended, None if it takes too long."""
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._answer(process, self._wall_seconds)

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        assert process.stdout is not None, "it is a pipe"
        return process.stdout.readline() if select.select([process.stdout], [], [], seconds)[0] else None

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, started again if it has ended."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited(ENVIRONMENT) | own,
        )
        self._process = process
        version = self._answer(process, START_SECONDS)
        if not version:
            self.close()
            raise ValueError(
                f"rollout.structured_outputs: the process that tries it did not start (exit code {process.returncode});"
                f" run {sys.executable} {CHILD} '{json.dumps(self._limits)}' to see why"
            )
        self.vllm_version = json.loads(version) or ""
        return process

    def close(self) -> None:
        """End the process, if it runs. The next request starts it again."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "it is a pipe"
            try:
                stream.close()
            except BrokenPipeError:  # of a request that it did not read
                pass
        self._process = None


@functools.cache
def shared_trial() -> RequestTrial:
    """Return the trial of this process."""
    return RequestTrial()
