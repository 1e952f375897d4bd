"""One row per weight transport: its class on the trainer's side, and the class at the other end, in vLLM's workers.

The choices of `rollout.weight_sync_transport`, the trainer and vLLM's workers read the table. A transport of the user's
own has no row: the key names its class, and the class names its receiver (docs/weight_sync.md).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from megagrpo.config.paths import is_user_code
from megagrpo.config.section import ShownAs


class TransportRow(NamedTuple):
    """The two classes of a transport, as `package.module:Class`."""

    trainer_side: str  # a `Transport` of sync/trainer_side/transport.py
    receiver: str  # a `Receiver` of sync/vllm_side/receiver.py


_TRAINER, _VLLM = "megagrpo.sync.trainer_side", "megagrpo.sync.vllm_side"
TRANSPORTS = {
    "shared_memory": TransportRow(f"{_TRAINER}.shared_memory:SharedMemory", f"{_VLLM}.memory_receiver:MemoryReceiver"),
    "p2p": TransportRow(f"{_TRAINER}.point_to_point:PointToPoint", f"{_VLLM}.p2p_receiver:P2pReceiver"),
    "cuda_ipc": TransportRow(f"{_TRAINER}.cuda_ipc:CudaIpc", f"{_VLLM}.memory_receiver:MemoryReceiver"),
}


def _known_transport(value: object) -> object:
    if isinstance(value, str) and (value == "auto" or value in TRANSPORTS or is_user_code(value)):
        return value
    names = ", ".join(f"'{name}'" for name in ("auto", *TRANSPORTS))
    expected = f"{names}, or your own as FILE.py:NAME"
    raise PydanticCustomError("literal_error", "must be {expected}", {"expected": expected})


TransportName = Annotated[
    str, BeforeValidator(_known_transport), ShownAs(" | ".join(["auto", *TRANSPORTS, "FILE.py:NAME"]))
]
