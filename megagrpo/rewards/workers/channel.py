"""Messages to and from a process that runs user code: length-prefixed JSON over a socket. Nothing is unpickled.

A frame is 4 bytes, the length of the rest, and JSON in UTF-8. Floats keep their exact bits, NaN and infinities
included. The trainer may send more types than JSON has (`as_json` lists them). It receives plain JSON only, whatever
the other side sent.
"""

from __future__ import annotations

import base64
import datetime
import json
import select
import socket
import struct
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from megagrpo.rewards.target import Target

LONGEST = 1 << 26  # limit on the bytes of a message from user code
_WITHOUT_LIMIT = (1 << 32) - 1
_HEAD = struct.Struct(">I")
_AT_ONCE = 1 << 20  # bytes per read from the socket
_TAG = "\0type"  # the key of a dict that encodes a value of another type
_PLAIN = frozenset({str, int, float, bool, type(None)})


class ProtocolError(RuntimeError):
    """The other side sent an invalid message."""


class Channel:
    """One end of a connection. A worker uses the blocking `send` and `receive`, a trainer the non-blocking `post`,
    `flush` and `arrived`.

    `trusted`: the other side runs no user code, so its messages may have any length.
    """

    def __init__(self, connection: socket.socket, trusted: bool = False):
        self._socket, self._longest = connection, _WITHOUT_LIMIT if trusted else LONGEST
        self._incoming, self._outgoing = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    # -- non-blocking

    @property
    def has_more_to_send(self) -> bool:
        """Whether `flush` has bytes left to send."""
        return bool(self._outgoing)

    @property
    def has_half_a_message(self) -> bool:
        """Whether an incomplete message was received."""
        return bool(self._incoming)

    def post(self, message: Any) -> None:
        """Send as much of a message as the socket takes now. Raises TypeError or ValueError, with nothing sent, when it
        cannot be encoded as JSON."""
        self._outgoing += _frame(message, _WITHOUT_LIMIT)
        self.flush()

    def flush(self) -> None:
        """Continue to send. Does nothing when the other side is gone; `arrived` reports that."""
        try:
            while self._outgoing:
                del self._outgoing[
                    : self._socket.send(self._outgoing[:_AT_ONCE], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                ]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def arrived(self) -> list[Any]:
        """Return the messages that are complete. Raises EOFError when the other side is gone, ProtocolError for an
        invalid message."""
        try:
            read = self._socket.recv(_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not read:
            raise EOFError
        self._incoming += read
        messages = []
        while (message := self._next()) is not None:
            messages.append(message[0])
        return messages

    # -- blocking

    def send(self, message: Any) -> None:
        """Send a message. Raises TypeError or ValueError, with nothing sent, when it cannot be encoded as JSON or is
        too long; OSError when the other side is gone."""
        self._socket.sendall(_frame(message, LONGEST))

    def receive(self, seconds: float | None = None) -> Any:
        """Wait for the next message and return it. Raises TimeoutError when it is not complete within `seconds`, and
        the errors of `arrived`."""
        ends = None if seconds is None else time.monotonic() + seconds
        while (message := self._next()) is None:
            left = None if ends is None else ends - time.monotonic()
            if not select.select([self._socket], [], [], left if left is None else max(0.0, left))[0]:
                raise TimeoutError
            self._incoming += self._read()
        return message[0]

    def _read(self) -> bytes:
        try:
            read = self._socket.recv(_AT_ONCE)
        except OSError as error:
            raise EOFError from error
        if not read:
            raise EOFError
        return read

    def _next(self) -> tuple[Any] | None:
        if len(self._incoming) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._incoming)
        if length > self._longest:
            raise ProtocolError(f"it announced a message of {length} bytes; {LONGEST} are allowed")
        if len(self._incoming) < _HEAD.size + length:
            return None
        text = bytes(self._incoming[_HEAD.size : _HEAD.size + length])
        del self._incoming[: _HEAD.size + length]
        try:
            return (json.loads(text),)
        except (ValueError, RecursionError):
            raise ProtocolError("it sent a message that is not JSON") from None


def _frame(message: Any, longest: int) -> bytes:
    # json.loads reads lone surrogates back
    text = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    if len(text) > longest:
        raise ValueError(f"a message of {len(text)} bytes; {longest} are allowed")
    return _HEAD.pack(len(text)) + text


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
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    SimpleNamespace: (vars, lambda members: SimpleNamespace(**members)),
    Target: (lambda value: list(vars(value).values()), lambda parts: Target(*parts)),
    dict: (lambda value: [[key, item] for key, item in value.items()], dict),  # dicts with keys that are not strings
}
_BASES: tuple[type[Any], ...] = (str, bool, int, float, dict, list, tuple)
_BY_NAME = {kind.__name__: build for kind, (_, build) in _TYPES.items()}


def as_json(value: Any) -> Any:
    """Encode `value` as plain JSON that `from_json` decodes, including tuples, sets, dates, bytes and keys that are not
    strings.

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
    # of NumPy; of pandas, for parquet's times in nanoseconds
    for method in ("tolist", "to_pydatetime", "to_pytimedelta"):
        if hasattr(value, method):
            return as_json(getattr(value, method)())
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be passed to a worker; convert it to numbers, text, lists or "
        f"dicts"
    )


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
