"""One row per weight transport: its class on the trainer's side, and the class at the other end, in vLLM's workers.

The choices of `rollout.weight_sync_transport`, the trainer and vLLM's workers read the table. A transport of the user's
own has no row: the key names its class, and the class names its receiver (docs/transports.md).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from megagrpo.config.sections.section import choice_or_user_code


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


TransportName = Annotated[str, *choice_or_user_code(["auto", *TRANSPORTS])]
