"""Moves the policy's weights to the engine, shard to shard, and verifies that they arrived.

Every trainer rank offers the blocks it holds, and every worker of the engine takes only the slices that its loaders
copy. No tensor is gathered. A transport moves the slices (`transport.py`). This file holds the common part.

An update counts only after its reports are verified. Each element of each tensor arrived, the checksums of received and
sent slices are equal, and the version is the one sent. Until then the engine stays paused. A trainer that shares its
GPU moves its state in a `Handover`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import ServerDied
from megagrpo.families.shared.blocks import Block, with_last_dim
from megagrpo.platform.process.progress_hook import SILENT_TASK, Task
from megagrpo.sync.trainer_side.shared_memory import SharedMemory
from megagrpo.sync.trainer_side.transport import (
    NO_HANDOVER,
    Handover,
    Parameter,
    Ranks,
    SendReport,
    Transport,
    Update,
    Weight,
    outcome_of_first_rank,
    reports_of_ranks,
)
from megagrpo.sync.trainer_side.transport import Weights as Weights
from megagrpo.types import WeightSyncError
from megagrpo.weights.slices.tensor_index import ENGINE_DTYPES, addends, in_addends


@dataclass(frozen=True)
class SyncReport:
    """Duration and size of one sync. Bytes are summed over all ranks and all workers.

    If a server died, the push was restarted: `total_seconds` covers all attempts, every other number only the last one.

    `send_seconds` and `read_seconds` overlap, and both lie within `load_seconds`. `send_seconds` is for the slowest
    rank. `read_seconds` is the copy time of the slowest worker, including the wait for slices that are not sent yet.
    """

    weight_version: int
    publish_seconds: float
    load_seconds: float
    total_seconds: float
    checksum_seconds: float  # slowest rank plus slowest worker; part of load_seconds
    bytes_published: int
    bytes_read: int
    send_seconds: float = 0.0
    read_seconds: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The report's rows in `metrics.jsonl`."""
        return {
            "weight_sync/publish_seconds": self.publish_seconds,
            "weight_sync/load_seconds": self.load_seconds,
            "weight_sync/checksum_seconds": self.checksum_seconds,
            "weight_sync/gigabytes": self.bytes_published / 1e9,
        }


class WeightSync:
    """Pushes weights from all ranks to the engine. Every rank makes one and calls `push`; only rank 0 uses `engine`.

    `dtype` is the engine's, a key of ENGINE_DTYPES: weights are cast on their way; another dtype is a ValueError.
    `say` receives a warning when a push restarts. A context manager; `close` frees the transport.
    """

    def __init__(
        self,
        engine: VllmEngine | None,
        ranks: Ranks,
        dtype: str,
        transport: Transport | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        if dtype not in ENGINE_DTYPES:
            raise ValueError(f"weight sync: dtype {dtype!r} is not one of {', '.join(ENGINE_DTYPES)}")
        assert engine is not None or ranks.world_rank > 0, "rank 0 drives the engine"
        self.engine, self.ranks, self.dtype, self.say = engine, ranks, dtype, say
        self.transport: Transport = transport or SharedMemory(ranks, dtype)
        # the last update that all ranks have sent, and their reports; `load_last` loads it again
        self._delivered: tuple[Update, list[SendReport]] | None = None
        self._driving = threading.Lock()  # `push` and `load_last` call the engine from two threads

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the transport's resources."""
        self.transport.close()

    @torch.no_grad()
    def push(
        self, parameters: Weights, weight_version: int, handover: Handover = NO_HANDOVER, task: Task = SILENT_TASK
    ) -> SyncReport:
        """Send the parameters to the engine as `weight_version`. Collective. `task` counts the bytes this rank sends.

        `parameters` comes from `megagrpo.weights.blocks.parameter_blocks.blocks`: (parameter name, parameter [...], its
        blocks), with the same parameters on every call. Raises WeightSyncError on every rank when any part fails. Then
        the engine is paused, and `push` may be called again. When a required server dies, the push restarts with the
        remaining servers, or with the same server once it is back.
        """
        started = time.perf_counter()
        handover.before_sending()
        weights = [self._as_sent(*weight) for weight in parameters]
        while True:
            began = time.perf_counter()
            with ExitStack() as memory:
                update = memory.enter_context(self.transport.prepare(weights, weight_version, self.engine))
                prepared = time.perf_counter()
                with self._driving:
                    outcome = outcome_of_first_rank(self.ranks, self._deliver(update, task), 5)
                    memory.close()
                    if not isinstance(outcome, WeightSyncError):
                        handover.before_serving()
                        resumed = outcome_of_first_rank(self.ranks, self._resume(update) or (), 0)
                        outcome = resumed or outcome
            if not isinstance(outcome, WeightSyncError):
                ended = time.perf_counter()
                checksum_seconds, published, read, send_seconds, read_seconds = outcome
                return SyncReport(
                    weight_version,
                    publish_seconds=prepared - began,
                    load_seconds=ended - prepared,
                    total_seconds=ended - started,
                    checksum_seconds=checksum_seconds,
                    bytes_published=int(published),
                    bytes_read=int(read),
                    send_seconds=send_seconds,
                    read_seconds=read_seconds,
                )
            if not isinstance(outcome, ServerDied):
                raise outcome
            self.say(f"warning: a vLLM server died during a weight sync; restarting the sync: {outcome}")
            handover.before_sending()  # the weights are already offloaded if the server died during resume

    def _as_sent(self, name: str, param: Parameter, blocks: Sequence[Block]) -> Weight:
        """Return the parameter and blocks in the form that is sent. For a bfloat16 engine, a tensor that vLLM keeps in
        float32 is split into `addends`."""
        if not any(in_addends(block.name, self.dtype) for block in blocks):
            return name, param, blocks
        sent = addends(param.detach().float())
        return name, sent, [with_last_dim(block, sent.shape[-1]) for block in blocks]

    def load_last(self, url: str) -> int | None:
        """Load the weights of the last `push` into the restarted server at `url`. Call it on rank 0, from any thread.

        Returns their version, or None when the transport needs all ranks, so the server must wait for the next `push`.
        Before the first push it loads nothing and returns the engine's version. Raises WeightSyncError when the load
        fails; the server stays paused.
        """
        assert self.engine is not None, "rank 0 drives the engine"
        with self._driving:
            if self._delivered is None:
                return self.engine.weight_version
            if not self.transport.refills:
                return None
            update, sent = self._delivered
            update.verify(sent, self.engine.load_weights(update, only=[url]))
            self.engine.resume(update, only=[url])
            return update.index.version

    def _deliver(self, update: Update, task: Task) -> tuple[float, ...] | WeightSyncError:
        """Send from every rank while the engine loads and verifies; return the last five fields of a `SyncReport`, or
        the error, on rank 0.

        This method does not raise, because the other ranks wait for its result. It returns () on other ranks.
        """
        with ThreadPoolExecutor(1) as side:
            loading = side.submit(self._load, self.engine, update) if self.engine is not None else None
            began = time.perf_counter()
            try:
                report = update.send(task)
            except Exception as error:
                report = SendReport(0, problem=f"rank {self.ranks.world_rank}: {error_text(error)}")
            report = replace(report, seconds=time.perf_counter() - began)
            sent = reports_of_ranks(self.transport.ranks, report)
        if loading is None:
            return ()
        try:
            if problems := [report.problem for report in sent if report.problem]:
                failure = loading.exception()
                problems += [error_text(failure)] if failure is not None else []
                raise _kind(failure)("; ".join(problems))
            # set before the result is known: a server that died during this update gets it from `load_last`
            self._delivered = update, sent
            reports = loading.result()
            update.verify(sent, reports)
        except Exception as error:
            return _not_reached(update.index.version, error)
        checksums, read = (
            max((report.get(key, 0.0) for report in reports), default=0.0)
            for key in ("checksum_seconds", "read_seconds")
        )
        return (
            max(report.checksum_seconds for report in sent) + checksums,
            sum(report.num_bytes for report in sent),
            sum(report["bytes"] for report in reports),
            max(report.seconds for report in sent),
            read,
        )

    def _resume(self, update: Update) -> WeightSyncError | None:
        """Make the engine serve the loaded weights. Returns an error on rank 0, or None."""
        try:
            if self.engine is not None:
                self.engine.resume(update)
        except Exception as error:
            return _not_reached(update.index.version, error)
        return None

    def _load(self, engine: VllmEngine, update: Update) -> list[dict[str, Any]]:
        """Load the update into the engine, while the ranks send it. Then stop ranks that still wait for a server."""
        why = "the servers have finished without it"
        try:
            return engine.load_weights(update)
        except Exception as error:
            why = error_text(error)
            raise
        finally:
            update.stopped = why


def error_text(error: BaseException) -> str:
    """Return the error as text for other ranks: with its type, unless it is a WeightSyncError."""
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"


def _kind(error: BaseException | None) -> type[WeightSyncError]:
    return ServerDied if isinstance(error, ServerDied) else WeightSyncError


def _not_reached(version: int, error: BaseException) -> WeightSyncError:
    return _kind(error)(f"weight version {version} did not reach the engine, which stays paused: {error_text(error)}")
