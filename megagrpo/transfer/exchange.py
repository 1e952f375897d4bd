"""What trainer ranks and workers share to move weights directly between them: a board for notes, and a group for tensors.

Both live beside whatever process groups a process has: vLLM's workers own a default group, and so do the trainer's ranks. One group holds
the trainer's ranks, first, and the workers of all servers, in order: gloo for tensors of a CPU, NCCL for those of a GPU.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from megagrpo.transfer.manifest import WeightSyncError

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
CODE_LENGTH = 64  # hexadecimal digits before each note
LONGEST_PAUSE = 0.1  # seconds between two looks at the board


class Deadline:
    """A point in time, `seconds` after it was made."""

    def __init__(self, seconds: float):
        self.seconds, self._ends = seconds, time.monotonic() + seconds

    def left(self) -> timedelta:
        """Time until then; never quite nothing, which torch takes for "forever"."""
        return timedelta(seconds=max(0.001, self._ends - time.monotonic()))

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() > self._ends


class Board:
    """Notes for each other, by key, as JSON. Rank 0 of the trainer serves it, on the address `host` alone ("" is all of this host's) and on
    `port`, which it picks; the others join.

    The store below lets in whoever reaches it. So each note carries a code that only those who know `secret` can make for this note under
    this key: what strangers leave is an error, never an instruction. Groups meet under keys that begin with a digest of the secret.
    """

    def __init__(self, host: str, port: int, deadline: Deadline, secret: str, *, serve: bool = False):
        self.host, self._secret = host, secret.encode()
        try:
            # torch would listen on every address; it closes the socket that it gets.
            listen = socket.create_server((host, port), backlog=4096).detach() if serve else None
            reached = host or LOOPBACK
            self.store = dist.TCPStore(
                reached, port, is_master=serve, timeout=deadline.left(), wait_for_workers=False, master_listen_fd=listen
            )
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"the trainer's board at {host}:{port} cannot be reached: {_first_line(error)}") from None
        self.port = self.store.port

    def meeting_point(self, name: str) -> dist.Store:
        """Where the members of a group find each other."""
        return dist.PrefixStore(self._code("group", name), self.store)

    def _code(self, key: str, text: str) -> str:
        return hmac.digest(self._secret, f"{key}\n{text}".encode(), "sha256").hex()

    def put(self, key: str, value: Any) -> None:
        """Leave a note; it is there when this returns."""
        try:
            text = json.dumps(value)
            self.store.set(key, self._code(key, text) + text)
        except RuntimeError as error:
            raise WeightSyncError(f"the trainer's board is gone: {_first_line(error)}") from None
        self.has(key)  # answered after the note was taken in, which `set` does not wait for

    def has(self, key: str) -> bool:
        """Whether somebody has left this note. WeightSyncError when the board is gone."""
        try:
            return self.store.check([key])
        except RuntimeError as error:
            raise WeightSyncError(f"the trainer's board is gone: {_first_line(error)}") from None

    def find(self, key: str) -> Any:
        """A note, or None when nobody has left it. WeightSyncError when the board is gone, or the note is none of this run's."""
        if not self.has(key):
            return None
        note = self.store.get(key)
        code, text = note[:CODE_LENGTH], note[CODE_LENGTH:].decode(errors="replace")
        if not hmac.compare_digest(code, self._code(key, text).encode()):
            raise WeightSyncError(f"the trainer's board: the note {key} was left by somebody who does not know this run's secret")
        return json.loads(text)

    def take(self, key: str, what: str, deadline: Deadline, stop: str = "") -> Any:
        """A note, as soon as it is there. WeightSyncError that says `what` was waited for when the deadline passes, or when a note `stop`
        appears, which holds the reason."""
        pause = 0.001  # not `TCPStore.wait`, which writes warnings whenever it does not succeed at once
        while (value := self.find(key)) is None:
            if stop and (reason := self.find(stop)) is not None:
                raise WeightSyncError(f"waiting for {what}: {reason}")
            if deadline.passed:
                raise WeightSyncError(f"waiting for {what}: nothing came within {deadline.seconds:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE)
        return value

    def answers(self) -> bool:
        """Whether the board is still there."""
        try:
            self.has("anything")
        except WeightSyncError:
            return False
        return True

    def remove(self, keys: Sequence[str]) -> None:
        """Take notes away, those that are there."""
        for key in keys:
            self.store.delete_key(key)


@dataclass(frozen=True)
class Parcel:
    """A buffer on its way to or from `peer`; `what` says for messages what that is."""

    buffer: Tensor
    peer: int
    tag: int
    what: str


Pending = tuple[dist.Work, str]  # what is under way, and what it is


class Exchange:
    """A group for messages from one process to another. Making one takes all `size` processes at once."""

    def __init__(self, board: Board, name: str, rank: int, size: int, device: torch.device, deadline: Deadline):
        store = board.meeting_point(name)
        self.name, self.device = name, device
        try:
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = deadline.left()
                self.group = dist.ProcessGroupNCCL(store, rank, size, options)
                self.group.eager_connect_single_device(device)  # now, with everybody: later not all ranks take part in each call
            else:
                self.group = dist.ProcessGroupGloo(store, rank, size, _gloo_options(board.host, deadline))
        except RuntimeError as error:
            raise WeightSyncError(f"forming the group of {size} ranks and workers: {_first_line(error)}") from None

    def send(self, parcels: Sequence[Parcel]) -> list[Pending]:
        """Start to send them, all at once."""
        return self._post(self.group.send, parcels)

    def receive(self, parcels: Sequence[Parcel]) -> list[Pending]:
        """Start to receive them, all at once."""
        return self._post(self.group.recv, parcels)

    def _post(self, verb: Any, parcels: Sequence[Parcel]) -> list[Pending]:
        together = self.group.supports_coalescing
        if together:
            self.group._start_coalescing()
        works = []
        for parcel in parcels:
            try:
                works.append(verb([parcel.buffer.view(torch.uint8)], parcel.peer, parcel.tag))
            except RuntimeError as error:
                raise WeightSyncError(f"{parcel.what}: {_first_line(error)}") from None
        if together:
            return [(self.group._end_coalescing(), ", ".join(dict.fromkeys(parcel.what for parcel in parcels)))]
        return [(work, parcel.what) for work, parcel in zip(works, parcels, strict=True)]

    def close(self) -> None:
        """Leave the group. Whoever waits for this process gets an error."""
        if self.group is not None and self.device.type == "cuda":
            self.group.abort()
        self.group = None


def _gloo_options(host: str, deadline: Deadline) -> dist.ProcessGroupGloo._Options:
    """Options by which gloo listens on the interface that leads to the board alone; GLOO_SOCKET_IFNAME may name another one."""
    options, named = dist.ProcessGroupGloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    options._timeout = deadline.left()
    address = own_address(f"http://{host}") if host else socket.gethostname()
    place = dict(hostname=address) if named == LOOPBACK_INTERFACE else dict(interface=named)
    options._devices = [dist.ProcessGroupGloo.create_device(**place)]
    return options


def wait(pending: Sequence[Pending], deadline: Deadline) -> None:
    """Wait until everything has been sent or received; WeightSyncError with what it is when that fails or takes too long."""
    for work, what in pending:
        try:
            work.wait(deadline.left())
        except RuntimeError as error:
            late = f"not done within {deadline.seconds:g} s" if deadline.passed else _first_line(error)
            raise WeightSyncError(f"{what}: {late}") from None


def let_go(error: BaseException) -> None:
    """Drop what the frames of a caught exception hold: a message under way keeps the connections of its group open, and whoever is at their
    other end waiting."""
    traceback.clear_frames(error.__traceback__)


def own_address(url: str) -> str:
    """This host's address as the server at `url` reaches it."""
    return _route(url)[0]


def is_here(url: str) -> bool:
    """Whether the server at `url` is on this host."""
    try:
        own, there = _route(url)
    except OSError:  # no way there
        return False
    return own == there


def _route(url: str) -> tuple[str, str]:
    """This host's address on the way to the server at `url`, and the server's."""
    parts = urlsplit(url)
    family, kind, *_, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, only asks for the route
        return probe.getsockname()[0], address[0]


def _first_line(error: BaseException) -> str:
    """What torch says, without where in its sources."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(" This is typically")[0][:300]
