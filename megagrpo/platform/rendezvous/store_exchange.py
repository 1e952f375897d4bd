"""Rendezvous of trainer ranks and vLLM workers for `p2p`: key-value store for JSON messages, process group for tensors.

Both exist beside the default process groups of vLLM's workers and trainer ranks. One group holds the trainer's ranks
first, then the workers of all servers, in order. Its backend is gloo for CPU tensors and NCCL for GPU tensors.
"""

from __future__ import annotations

import hmac
import json
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.loopback import LOOPBACK, LOOPBACK_ADDRESS
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.types import WeightSyncError

CODE_LENGTH = 64  # hexadecimal digits of the HMAC before each value
STORE_POLL_SECONDS = 0.1  # most seconds between two polls of the store


class Deadline:
    """A point in time, `seconds` after construction."""

    def __init__(self, seconds: float):
        self.seconds, self._ends = seconds, time.monotonic() + seconds

    def left(self) -> timedelta:
        """Return the time left, at least 1 ms: torch treats a timeout of 0 as "forever"."""
        return timedelta(seconds=max(0.001, self._ends - time.monotonic()))

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._ends


class Store:
    """An authenticated key-value store for JSON values, which trainer ranks and workers share.

    Rank 0 of the trainer serves the store; the others connect. It listens only on the address `host` ("" means all
    addresses of this host). It picks `port` when `port` is 0. Raises WeightSyncError when the store cannot be reached.

    The TCPStore below accepts every connection. So each value carries an HMAC of its key and text, made with `secret`.
    A value with a wrong HMAC is an error and is never parsed. Process groups rendezvous under keys that begin with an
    HMAC of the group's name. Errors call the store `name`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        deadline: Deadline,
        secret: str,
        *,
        serve: bool = False,
        name: str = "the trainer's store",
    ):
        self.host, self._secret, self._name = host, secret.encode(), name
        try:
            # By itself torch would listen on every address. torch closes the socket passed to it.
            listen = socket.create_server((host, port), backlog=4096).detach() if serve else None
            reached = host or LOOPBACK_ADDRESS
            self.tcp_store = dist.TCPStore(
                reached, port, is_master=serve, timeout=deadline.left(), wait_for_workers=False, master_listen_fd=listen
            )
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"{name} at {host}:{port} cannot be reached: {_first_line(error)}") from None
        self.port = self.tcp_store.port

    def of_group(self, name: str) -> dist.Store:
        """Return the store through which the members of the process group `name` rendezvous."""
        return dist.PrefixStore(self._code("group", name), self.tcp_store)

    def _code(self, key: str, text: str) -> str:
        return hmac.digest(self._secret, f"{key}\n{text}".encode(), "sha256").hex()

    def put(self, key: str, value: Any) -> None:
        """Store a value; it is there when this method returns. Raises WeightSyncError when the store is gone."""
        text = json.dumps(value)
        with self._connected():
            self.tcp_store.set(key, self._code(key, text) + text)
        self.has(key)  # `set` does not wait; the reply to this request comes after the value is stored

    def has(self, key: str) -> bool:
        """Whether there is a value with this key. Raises WeightSyncError when the store is gone."""
        return self._has_all([key])

    def _has_all(self, keys: Sequence[str]) -> bool:
        with self._connected():
            return self.tcp_store.check(list(keys))

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise WeightSyncError(f"connection to {self._name} lost: {_first_line(error)}") from None

    def find(self, key: str) -> Any:
        """Return a value, or None without one. Raises WeightSyncError when the store is gone or an HMAC is wrong."""
        if not self.has(key):
            return None
        return self._read(key, self.tcp_store.get(key))

    def _read(self, key: str, value: bytes) -> Any:
        code, text = value[:CODE_LENGTH], value[CODE_LENGTH:].decode(errors="replace")
        if not hmac.compare_digest(code, self._code(key, text).encode()):
            raise WeightSyncError(
                f"{self._name}: key {key} has an invalid HMAC; a process without this run's secret wrote it"
            )
        return json.loads(text)

    def take(self, key: str, what: str, deadline: Deadline) -> Any:
        """Return a value as soon as it exists: one request, which the store answers then. It stays in the store.

        Other threads that use this connection wait meanwhile. Raises WeightSyncError, which names `what` was awaited,
        when the deadline passes, or as `find` does.
        """
        try:
            self.tcp_store.set_timeout(deadline.left())
            value = self.tcp_store.get(key)
        except RuntimeError as error:
            late = f"timed out after {deadline.seconds:g} s" if deadline.passed else _first_line(error)
            raise WeightSyncError(f"waiting for {what}: {late}") from None
        return self._read(key, value)

    def take_all(
        self, keys: Sequence[str], names: Sequence[str], deadline: Deadline, stopped: Callable[[], str]
    ) -> list[Any]:
        """Wait for the values of all keys, and return them. One request polls them all.

        Raises WeightSyncError, with the name of the first missing value, when the deadline passes or `stopped` returns
        a reason.
        """
        pause = 0.001
        while not self._has_all(keys):
            if reason := stopped() or (f"timed out after {deadline.seconds:g} s" if deadline.passed else ""):
                missing = next((name for name, key in zip(names, keys, strict=True) if not self.has(key)), names[0])
                raise WeightSyncError(f"waiting for {missing}: {reason}")
            time.sleep(pause)
            pause = min(1.5 * pause, STORE_POLL_SECONDS)
        return self.find_all(keys)

    def find_all(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that exist, with one request. Raises WeightSyncError as `find` does."""
        with self._connected():
            values = self.tcp_store.multi_get(list(keys))
        return [self._read(key, value) for key, value in zip(keys, values, strict=True)]

    def wait_for(self, key: str, what: str, deadline: Deadline) -> Any:
        """Wait for a value and return it; it stays in the store. Other threads may use this connection meanwhile.

        Raises WeightSyncError, which names `what` was awaited, when the deadline passes.
        """
        return self.take_all([key], [what], deadline, lambda: "")[0]

    def answers(self) -> bool:
        """Whether the store still responds."""
        try:
            self.has("anything")
        except WeightSyncError:
            return False
        return True

    def remove(self, keys: Iterable[str]) -> None:
        """Delete the values with these keys; missing keys are ignored."""
        for key in keys:
            self.tcp_store.delete_key(key)


@dataclass(frozen=True)
class PeerBuffer:
    """Memory in flight to or from the process `peer`: a contiguous tensor [...] of any dtype, sent as bytes. `what`
    describes it for errors."""

    values: Tensor
    peer: int
    tag: int
    what: str


Pending = tuple[dist.Work, str]  # an in-flight operation, and its description for errors


class Exchange:
    """A process group for point-to-point messages. Construction is collective over all `size` processes.

    Raises WeightSyncError when the group cannot be formed.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, device: torch.device, deadline: Deadline):
        members = store.of_group(name)
        self.name, self.device = name, device
        self.group: Any = None  # torch's types lack the methods that this class calls
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = deadline.left()
                self.group = dist.ProcessGroupNCCL(members, rank, size, options)
                # connect while all ranks take part: later calls involve only some
                self.group.eager_connect_single_device(device)
            else:
                self.group = dist.ProcessGroupGloo(members, rank, size, _gloo_options(store.host, deadline))
        except RuntimeError as error:
            raise WeightSyncError(
                f"cannot form the process group of {size} ranks and workers: {_first_line(error)}"
            ) from None

    def send(self, buffers: Sequence[PeerBuffer]) -> list[Pending]:
        """Start to send all buffers at once. Raises WeightSyncError when a send cannot start."""
        return self._post(self.group.send, buffers)

    def receive(self, buffers: Sequence[PeerBuffer]) -> list[Pending]:
        """Start to receive all buffers at once. Raises WeightSyncError when a receive cannot start."""
        return self._post(self.group.recv, buffers)

    def _post(self, verb: Any, buffers: Sequence[PeerBuffer]) -> list[Pending]:
        coalesces = self.group.supports_coalescing
        if coalesces:
            self.group._start_coalescing()
        works = []
        for buffer in buffers:
            try:
                works.append(verb([buffer.values.view(torch.uint8)], buffer.peer, buffer.tag))
            except RuntimeError as error:
                raise WeightSyncError(f"{buffer.what}: {_first_line(error)}") from None
        if coalesces:
            return [(self.group._end_coalescing(), ", ".join(dict.fromkeys(buffer.what for buffer in buffers)))]
        return [(work, buffer.what) for work, buffer in zip(works, buffers, strict=True)]

    def cancel(self, pending: Iterable[Pending]) -> None:
        """End operations in flight before `close`.

        gloo's thread would poll the socket of a half-received message for ever, and `close` would wait for the thread.
        A wait that times out closes all connections of a gloo group.
        """
        for work, _ in pending:
            if self.device.type != "cuda":
                with suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Leave the group. Processes that wait for this process get an error."""
        if self.group is not None and self.device.type == "cuda":
            self.group.abort()
        self.group = None


def _gloo_options(host: str, deadline: Deadline) -> Any:
    """Make gloo listen only on the interface that leads to the store, or on GLOO_SOCKET_IFNAME unless it is `lo`."""
    gloo: Any = dist.ProcessGroupGloo
    options, named = gloo._Options(), ENVIRONMENT.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    options._timeout = deadline.left()
    address = own_address(f"http://{host}") if host else socket.gethostname()
    listener = dict(hostname=address) if named == LOOPBACK else dict(interface=named)
    options._devices = [gloo.create_device(**listener, lazy_init=False)]  # whatever a worker's environment names
    return options


def wait(pending: Sequence[Pending], deadline: Deadline) -> None:
    """Wait for every operation. Raises WeightSyncError describing one that fails or misses the deadline."""
    for work, what in pending:
        try:
            work.wait(deadline.left())
        except RuntimeError as error:
            late = f"timed out after {deadline.seconds:g} s" if deadline.passed else _first_line(error)
            raise WeightSyncError(f"{what}: {late}") from None


def clear_frames(error: BaseException) -> None:
    """Clear the frames of a caught exception. An in-flight message in a frame keeps its group's connections open, and
    the peers would keep waiting."""
    traceback.clear_frames(error.__traceback__)


def own_address(url: str) -> str:
    """Return the address of this host on the route to the server at `url`. Raises OSError when there is no route."""
    return _route(url)[0]


def is_here(url: str) -> bool:
    """Whether the server at `url` runs on this host; False when there is no route to it."""
    try:
        this_host, server = _route(url)
    except OSError:  # no route, or an unknown name
        return False
    return this_host == server


def _route(url: str) -> tuple[str, str]:
    """Return (this host's address, the server's address) on the route to `url`. Raises OSError without a route."""
    parts = urlsplit(url)
    family, kind, *_, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # UDP: connecting sends nothing and only selects the route
        return probe.getsockname()[0], str(address[0])


def _first_line(error: BaseException) -> str:
    """Return the first line of torch's error message, at most 300 characters, without the source location."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(" This is typically")[0][:300]
