"""Moves the policy's weights to the engine, shard to shard, and proves that they arrived.

Every trainer rank offers the blocks it holds; every worker of the engine takes just the slices its loaders copy. No tensor is gathered.
How the slices travel is a transport's business: `shared_memory.py`, `point_to_point.py`, `cuda_ipc.py`. What is the same for all of them
is here: an update counts only after its reports have been verified: each element of each tensor arrived, the checksums of what arrived
equal those of what was given, and the version is the one that was sent. Until then the engine stays paused. A trainer that gives its memory
to the engine has done so before it serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from megagrpo.engine.protocol import Engine, ServerDied
from megagrpo.families.blocks import Block, with_last_dim
from megagrpo.transfer.manifest import DTYPES, WeightSyncError, addends, in_addends
from megagrpo.weight_sync.cuda_ipc import CudaIpc
from megagrpo.weight_sync.point_to_point import PointToPoint
from megagrpo.weight_sync.shared_memory import SharedMemory
from megagrpo.weight_sync.transport import Given, Ranks, Transport, Update
from megagrpo.weight_sync.transport import Stays as Stays
from megagrpo.weight_sync.transport import Weights as Weights


@dataclass(frozen=True)
class SyncReport:
    """What one sync took. Bytes are counted over all ranks and all workers. Inside of `load_seconds`, beside each other: `send_seconds`, of
    the slowest rank, and `read_seconds`, which copying took the slowest worker, waiting for what is not sent yet included."""

    weight_version: int
    publish_seconds: float
    load_seconds: float
    total_seconds: float
    checksum_seconds: float  # of the slowest rank and the slowest worker, added; part of load
    bytes_published: int
    bytes_read: int
    send_seconds: float = 0.0
    read_seconds: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """As `metrics.jsonl` has them."""
        return {
            "weight_sync/publish_seconds": self.publish_seconds,
            "weight_sync/load_seconds": self.load_seconds,
            "weight_sync/checksum_seconds": self.checksum_seconds,
            "weight_sync/gigabytes": self.bytes_published / 1e9,
        }


class WeightSync:
    """Pushes weights from all ranks to the engine. Every rank makes one and calls `push`; only rank 0's `engine` is used.

    `dtype` is the engine's, "float32" or "bfloat16": weights are cast on their way. `say` gets a line when a push begins anew. `offload`
    keeps on the device what a push, and then the engine, leave room for. A context manager; `close` frees what the transport holds.
    """

    def __init__(
        self,
        engine: Engine | None,
        ranks: Ranks,
        dtype: str,
        transport: Transport | None = None,
        say: Callable[[str], None] = lambda text: None,
        offload: Stays | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"weight sync: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        assert engine is not None or ranks.world_rank > 0, "rank 0 drives the engine"
        self.engine, self.ranks, self.dtype, self.say = engine, ranks, dtype, say
        self.transport, self.offload = transport or SharedMemory(ranks, dtype), offload or Stays()
        self._delivered: Update | None = None
        self._driving = threading.Lock()  # the engine, which `push` and `refill` do from two threads

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Free what the transport holds."""
        self.transport.close()

    @torch.no_grad()
    def push(self, found: Weights, weight_version: int) -> SyncReport:
        """Give the engine the parameters as they are now, as `weight_version`. Collective.

        `found` is what `megagrpo.bridge.families.blocks` yields: (parameter name, parameter, its blocks); the same parameters on every
        call. Raises WeightSyncError on every rank when any part fails: the engine is paused then, and `push` may be called again. Where a
        server dies that had to take part, this begins anew with those that are left, or with the same one when it is back.
        """
        started = time.perf_counter()
        self.offload.keep_weights()
        sent = [self._as_sent(*held) for held in found]
        while True:
            began = time.perf_counter()
            update = self.transport.prepare(sent, weight_version, self.engine)
            prepared = time.perf_counter()
            with self._driving:
                outcome = self.ranks.all_gather_objects(self._deliver(update))[0]
                update.done()
                if not isinstance(outcome, WeightSyncError):
                    self.offload.keep_nothing()
                    outcome = self.ranks.all_gather_objects(self._resume(update))[0] or outcome
            if not isinstance(outcome, WeightSyncError):
                ended = time.perf_counter()
                return SyncReport(weight_version, prepared - began, ended - prepared, ended - started, *outcome)
            if not isinstance(outcome, ServerDied):
                raise outcome
            self.say(f"warning: a vLLM server died in a weight sync, which begins anew: {outcome}")
            self.offload.keep_weights()  # they have left where it died just before it served them

    def _as_sent(self, name: str, param: Tensor, blocks: Sequence[Block]) -> tuple[str, Tensor, Sequence[Block]]:
        """What a parameter and its blocks are on their way; another one than here where an engine in bfloat16 keeps it in float32."""
        if not any(in_addends(block.name, self.dtype) for block in blocks):
            return name, param, blocks
        sent = addends(param.detach().float())
        return name, sent, [with_last_dim(block, sent.shape[-1]) for block in blocks]

    def refill(self, url: str) -> bool:
        """Give the server at `url`, which was started again, the weights of the last `push`; False when it takes all ranks to give them and
        it must wait for the next. On rank 0 alone, from any thread. WeightSyncError when that fails; the server stays paused."""
        with self._driving:
            if self._delivered is None:
                return True
            if self._delivered.servers is not None:
                return False
            self._delivered.verify(self.engine.load_weights(self._delivered, only=[url]))
            self.engine.resume(self._delivered, only=[url])
        return True

    def _deliver(self, update: Update) -> tuple[float, int, int, float, float] | WeightSyncError | None:
        """Have every rank send, and the engine take it in: on rank 0 the last fields of a `SyncReport`, or what went wrong. It does not
        raise, for the other ranks wait."""
        with ThreadPoolExecutor(1) as side:
            loading = side.submit(self._load, update) if self.engine is not None else None
            problem, given, began = None, Given(0), time.perf_counter()
            try:
                given = update.send()
            except Exception as error:
                problem = f"rank {self.ranks.world_rank}: {_text(error)}"
            told = self.transport.all_gather((problem, given, time.perf_counter() - began))
        if loading is None:
            return None
        version, problems, failure = update.manifest.version, [problem for problem, *_ in told if problem], loading.exception()
        try:
            if problems:
                problems += [_text(failure)] * (failure is not None)
                raise _kind(failure)("; ".join(problems))
            self._delivered = update  # also for servers that died just now
            reports = loading.result()
            update.verify(reports)
            num_bytes = sum(given.num_bytes for _, given, _ in told), sum(report["bytes"] for report in reports)
            update.verify_bytes(*num_bytes)
        except Exception as error:
            return _not_reached(version, error)
        checksums, read = (max((report.get(key, 0.0) for report in reports), default=0.0) for key in ("checksum_seconds", "read_seconds"))
        sent = max(seconds for *_, seconds in told)
        return max(given.checksum_seconds for _, given, _ in told) + checksums, *num_bytes, sent, read

    def _resume(self, update: Update) -> WeightSyncError | None:
        """Have the engine serve what it has taken in: what went wrong, on rank 0."""
        try:
            if self.engine is not None:
                self.engine.resume(update)
        except Exception as error:
            return _not_reached(update.manifest.version, error)
        return None

    def _load(self, update: Update) -> list[dict]:
        """Have the engine take the update in, beside the ranks that send it."""
        why = "the servers have finished without it"
        try:
            return self.engine.load_weights(update)
        except Exception as error:
            why = _text(error)
            raise
        finally:
            update.give_up(why)


def make_transport(name: str, ranks: Ranks, dtype: str, device: torch.device, *, seconds: float, megabytes: float) -> Transport:
    """The transport of that name: shared_memory, p2p or cuda_ipc. Collective. `seconds` and `megabytes` as in `PointToPoint`."""
    if name == "p2p":
        return PointToPoint(ranks, dtype, device, seconds=seconds, megabytes=megabytes)
    return CudaIpc(ranks, dtype, device, seconds=seconds) if name == "cuda_ipc" else SharedMemory(ranks, dtype, seconds=seconds)


def _kind(error: BaseException | None) -> type[WeightSyncError]:
    return ServerDied if isinstance(error, ServerDied) else WeightSyncError


def _not_reached(version: int, error: BaseException) -> WeightSyncError:
    return _kind(error)(f"weight version {version} did not reach the engine, which stays paused: {_text(error)}")


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
