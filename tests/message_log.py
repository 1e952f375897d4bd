"""Records the messages that a rank sends through torch.distributed: objects over any group, tensors over host groups.

with record(layout) as messages:
    trainer.step()
assert not [message for message in messages if message.is_object], "an ordinary step sends Python objects"
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
# frames that only pass a message on: the caller is the first frame outside of these files
PASSING = (
    "/torch/",
    "/platform/parallel/layout.py",
    "/platform/parallel/agree.py",
    "/platform/parallel/host_messages.py",
    "/platform/parallel/bulk_messages.py",
)
PASSING += ("/message_log.py", "/contextlib.py", "/functools.py")


@dataclass
class Message:
    """One call of torch.distributed by this rank."""

    kind: str  # the function's name
    group_size: int
    sent: int  # bytes of this rank's own that reach other ranks, once each
    received: int  # bytes of other ranks, once each
    caller: str  # "file:line function", the file below the repository or site-packages
    is_object: bool  # whether a Python object was pickled for it


@contextlib.contextmanager
def record(layout: Any) -> Iterator[list[Message]]:
    """Record the messages of this rank while the context lasts, in the order of their calls, of all threads.

    Objects are recorded over any group, tensors over the host groups of `layout`. Functions that a module
    imported by name before are not seen.
    """
    host = {group for group in (layout.cpu_group, layout.leaders, layout.replica, layout.ends) if group is not None}
    messages: list[Message] = []
    depth = threading.local()

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature, is_object = inspect.signature(function), name in OBJECTS

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            group = arguments.get("group") or dist.group.WORLD
            outer = getattr(depth, "message", None)
            if not (is_object or outer is not None or group in host):
                return function(*args, **kwargs)
            sent, received = (0, 0) if is_object else TENSORS[name](arguments, group)
            if outer is None:
                message = Message(name, dist.get_world_size(group), sent, received, _caller(), is_object)
                messages.append(message)
                depth.message = message
            elif outer.is_object and not getattr(depth, "in_tensor", False):
                outer.sent += sent
                outer.received += received
            inside, depth.in_tensor = getattr(depth, "in_tensor", False), not is_object
            try:
                return function(*args, **kwargs)
            finally:
                depth.in_tensor = inside
                if outer is None:
                    depth.message = None

        return wrapper

    with contextlib.ExitStack() as stack:
        for name in (*OBJECTS, *TENSORS):
            wrapper = recorded(name, getattr(distributed_c10d, name))
            for module in (distributed_c10d, dist):
                stack.enter_context(mock.patch.object(module, name, wrapper))
        yield messages


def objects(messages: Iterable[Message]) -> list[str]:
    """Describe the messages that carry Python objects: "kind from file:line function"."""
    return [f"{message.kind} from {message.caller}" for message in messages if message.is_object]


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in PASSING):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    root = next((parent for parent in path.parents if parent.name == "site-packages"), Path(__file__).parents[1])
    return f"{path.relative_to(root) if path.is_relative_to(root) else path}:{frame.f_lineno} {frame.f_code.co_name}"


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors or []))


def _is_source(arguments: dict[str, Any], group: Any) -> bool:
    """Whether this rank is the source or destination that the arguments of a rooted collective name."""
    for name in ("src", "dst"):
        if arguments.get(name) is not None:
            return arguments[name] == dist.get_rank()
        if arguments.get(f"group_{name}") is not None:
            return arguments[f"group_{name}"] == dist.get_rank(group)
    return dist.get_rank() == 0


def _others(total: int, group: Any) -> int:
    """Bytes of `total`, equal parts of each rank of the group, that are not this rank's."""
    return total - total // dist.get_world_size(group)


def _broadcast(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    size = _bytes(arguments["tensor"]) if dist.get_world_size(group) > 1 else 0
    return (size, 0) if _is_source(arguments, group) else (0, size)


def _reduce(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    size = _bytes(arguments["tensor"]) if dist.get_world_size(group) > 1 else 0
    return (0, size) if _is_source(arguments, group) else (size, 0)


def _all_reduce(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    size = _bytes(arguments["tensor"]) if dist.get_world_size(group) > 1 else 0
    return size, size


def _gather(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    size, everything = _bytes(arguments["tensor"]), _bytes(arguments.get("gather_list"))
    return (0, everything - size) if _is_source(arguments, group) else (size, 0)


def _scatter(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    size, everything = _bytes(arguments["tensor"]), _bytes(arguments.get("scatter_list"))
    return (everything - size, 0) if _is_source(arguments, group) else (0, size)


def _all_to_all_single(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    rank, sizes = dist.get_rank(group), []
    for tensor, splits in (("input", "input_split_sizes"), ("output", "output_split_sizes")):
        size, rows = _bytes(arguments[tensor]), arguments.get(splits)
        if rows:
            row = size // max(sum(rows), 1)
            sizes.append(size - row * rows[rank])
        else:
            sizes.append(_others(size, group))
    return sizes[0], sizes[1]


def _all_to_all(arguments: dict[str, Any], group: Any) -> tuple[int, int]:
    lists, rank = (arguments["input_tensor_list"], arguments["output_tensor_list"]), dist.get_rank(group)
    sent, received = (_bytes(tensors) - _bytes(tensors[rank]) for tensors in lists)
    return sent, received


# (bytes sent, bytes received) of a call, by its bound arguments
TENSORS: dict[str, Callable[[dict[str, Any], Any], tuple[int, int]]] = {
    "send": lambda a, g: (_bytes(a["tensor"]), 0),
    "isend": lambda a, g: (_bytes(a["tensor"]), 0),
    "recv": lambda a, g: (0, _bytes(a["tensor"])),
    "irecv": lambda a, g: (0, _bytes(a["tensor"])),
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "all_gather": lambda a, g: (_bytes(a["tensor"]), _others(_bytes(a["tensor_list"]), g)),
    "all_gather_into_tensor": lambda a, g: (_bytes(a["input_tensor"]), _others(_bytes(a["output_tensor"]), g)),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": lambda a, g: (_others(_bytes(a["input_list"]), g), _bytes(a["output"])),
    "reduce_scatter_tensor": lambda a, g: (_others(_bytes(a["input"]), g), _bytes(a["output"])),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda a, g: (0, 0),
    "monitored_barrier": lambda a, g: (0, 0),
}
