"""Messages to and from a process that runs user code: length-prefixed JSON over a socket. Nothing is unpickled.

A frame is 4 bytes, the length of the rest, and JSON in UTF-8. Floats keep their exact bits, also NaN and infinities.
The trainer may send more types than JSON has (`as_json` lists them), but receives plain JSON, whatever is sent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from megagrpo.rewards.registry.target import Target
from megagrpo.row_image import RowImage

MAX_MESSAGE_BYTES = 1 << 26  # limit on a message from user code
_MAX_FRAME_BYTES = (1 << 32) - 1
_READ_BYTES = 1 << 20  # per read from the socket
_HEAD = struct.Struct(">I")
_TAG = "\0type"  # the key of a dict that encodes a value of another type
_PLAIN = frozenset({str, int, float, bool, type(None)})


@dataclass(frozen=True)
class Copies:
    """A list with `count` separate copies of a value, which is sent once."""

    value: Any
    count: int


class ProtocolError(RuntimeError):
    """The other side sent an invalid message."""


class Frames:
    """Cuts the bytes of a connection into messages of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES):
        self._max_bytes, self._bytes = max_bytes, bytearray()

    @property
    def is_partial(self) -> bool:
        """Whether an incomplete message was received."""
        return bool(self._bytes)

    def add(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are complete with `data`. Raises ProtocolError at an invalid message."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._bytes)
            if length > self._max_bytes:
                raise ProtocolError(f"it announced a message of {length} bytes; {self._max_bytes} are allowed")
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            text = bytes(self._bytes[_HEAD.size : end])
            del self._bytes[:end]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                raise ProtocolError("it sent a message that is not JSON") from None
            yield message


def frame(message: Any, max_bytes: int = _MAX_FRAME_BYTES) -> bytes:
    """Return the bytes of a message. Raises TypeError or ValueError when it is too long or not encodable as JSON."""
    # json.loads reads lone surrogates back
    text = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    if len(text) > max_bytes:
        raise ValueError(f"a message of {len(text)} bytes; {max_bytes} are allowed")
    return _HEAD.pack(len(text)) + text


class Channel:
    """The end of a connection in a process that runs user code, or in a worker towards its episodes.

    `trusted`: the other side runs no user code, so its messages may have any length.
    """

    def __init__(self, connection: socket.socket, trusted: bool = False):
        self._socket = connection
        self._frames = Frames(_MAX_FRAME_BYTES if trusted else MAX_MESSAGE_BYTES)
        self._messages: deque[Any] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def end_sending(self) -> None:
        """Have the other side read the end of the connection. A `receive` that waits goes on."""
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_WR)

    def send(self, message: Any) -> None:
        """Send a message. Raises the errors of `frame`, with nothing sent, and OSError when the other side is gone."""
        self._socket.sendall(frame(message, MAX_MESSAGE_BYTES))

    def receive(self, seconds: float | None = None) -> Any:
        """Wait for the next message and return it. Raises TimeoutError after `seconds`, and the errors of `read`."""
        ends = None if seconds is None else time.monotonic() + seconds
        while not self._messages:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                raise TimeoutError
            self._messages += self.read()
        return self._messages.popleft()

    async def receive_async(self, seconds: float) -> Any:
        """Like `receive`, but other coroutines run meanwhile."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self, readable.set)
        try:
            async with asyncio.timeout(seconds):
                while not self._messages:
                    await readable.wait()
                    readable.clear()
                    self._messages += self.read()
        finally:
            loop.remove_reader(self)
        return self._messages.popleft()

    def read(self) -> list[Any]:
        """Wait for bytes and return the messages that they complete. Raises EOFError when the other side is gone,
        ProtocolError for an invalid message."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return list(self._frames.add(data))


# ---------------------------------------------------------------------------------------------------- types beyond JSON

# type -> (encoder to a value that `as_json` knows, decoder)
_TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    **{t: (t.isoformat, t.fromisoformat) for t in (datetime.datetime, datetime.date, datetime.time)},
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    SimpleNamespace: (vars, lambda members: SimpleNamespace(**members)),
    RowImage: (lambda image: image.encoded, lambda content: RowImage(content).opened()),
    Copies: (
        lambda copies: [json.dumps(as_json(copies.value)), copies.count],
        lambda parts: [from_json(json.loads(parts[0])) for _ in range(parts[1])],
    ),
    Target: (lambda value: list(vars(value).values()), lambda parts: Target(*parts)),
    dict: (lambda value: [[key, item] for key, item in value.items()], dict),  # dicts with keys that are not strings
}
_BASES: tuple[type[Any], ...] = (str, bool, int, float, dict, list, tuple)
_BY_NAME = {kind.__name__: build for kind, (_, build) in _TYPES.items()}


def as_json(value: Any) -> Any:
    """Encode `value` as plain JSON for `from_json`, including tuples, sets, dates, bytes and keys that are not strings.
    Images of rows are decoded as PIL images.

    NumPy arrays and numbers become lists and numbers. Raises TypeError that names any other type.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [as_json(item) for item in value]
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: as_json(item) for key, item in value.items()}
    if kind in _TYPES:
        return {_TAG: [kind.__name__, as_json(_TYPES[kind][0](value))]}
    for base in _BASES:  # subclasses, including NumPy's, become the plain value
        if isinstance(value, base):
            return as_json(base(value))
    if kind.__module__.startswith("PIL."):
        return as_json(RowImage(value))
    # of NumPy; of pandas, for parquet's times in nanoseconds
    for method in ("tolist", "to_pydatetime", "to_pytimedelta"):
        if hasattr(value, method):
            return as_json(getattr(value, method)())
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(f"a {name} cannot be passed to a worker; convert it to numbers, text, lists or dicts")


def from_json(value: Any) -> Any:
    """Decode a value that `as_json` encoded."""
    if isinstance(value, list):
        return value if _PLAIN.issuperset(map(type, value)) else [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TAG}:
        name, inner = value[_TAG]
        return _BY_NAME[name](from_json(inner))
    return {key: from_json(item) for key, item in value.items()}
