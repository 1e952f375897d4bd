"""Methods of vLLM's workers that the trainer calls over `/collective_rpc`. `--worker-extension-cls` adds them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from megagrpo.platform.process.cleanup.ownership import FOLDER, OWNER_LOCK, SHARED_MEMORY, open_lock, owner_in
from megagrpo.platform.process.cleanup.removal import remove_tree
from megagrpo.sync.wire.copy_checksums import checksum


class WorkerVerbs:
    """The methods for `/collective_rpc`. They never raise; `engine.ShardEngine` explains why."""

    # of vLLM's worker; an annotation alone adds no attribute, which vLLM would reject
    weight_transfer_engine: Any
    finish_weight_update: Callable[[], None]
    vllm_config: Any
    model_runner: Any

    def end_weight_update(self) -> None:
        """End a weight update that the trainer has started and not finished, if any."""
        if self.weight_transfer_engine.open:
            self.finish_weight_update()

    def fill_towers(self) -> None:
        """Make the next weight update fill the towers of a multimodal model too, not its language model alone."""
        self.weight_transfer_engine.fills_towers = True

    def weight_update_report(self) -> str:
        """Return this worker's report on the last weight update as JSON, or "", for a trainer that received none."""
        return self.weight_transfer_engine.report

    def quantization(self) -> str:
        """Return the quantization that is applied to loaded weights, as a value of `rollout.quantization`."""
        return self.vllm_config.model_config.quantization or "none"

    def store_adapter(self, *part: Any) -> str:
        """Store a part of an adapter on this host, see `adapter_store.store`. Returns "" or the problem."""
        try:
            store(*part)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def adapter_problem(self, sums: dict[str, list[str]]) -> str:
        """Compare the last adapter with `sums`: projection (layers.0.self_attn.q_proj) -> [checksum of A, checksum of
        B * scale], as text, because other JSON readers have no 64-bit integers. Returns "" or the difference."""
        return difference(sums, self._adapter_checksums())

    def _adapter_checksums(self) -> dict[str, list[str]]:
        """Return the checksums of the last adapter. A and B are whole, in vLLM's adapter dtype."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapters = manager.list_adapters()
        if not adapters:
            return {}
        sums: dict[str, list[str]] = {}
        for name, weights in adapters[max(adapters)].loras.items():
            packed = isinstance(weights.lora_a, list)
            names = manager.packed_modules[name] if packed else [name]
            a, b = (weights.lora_a, weights.lora_b) if packed else ([weights.lora_a], [weights.lora_b])
            sums |= {
                projection: [_sum(x), _sum(y)] for projection, x, y in zip(names, a, b, strict=True) if x is not None
            }
        return {name[name.index("layers.") :]: of_adapter for name, of_adapter in sums.items()}


def difference(written: dict[str, list[str]], held: dict[str, list[str]]) -> str:
    """Return the first projection whose checksums differ, as a text, or ""."""
    odd = sorted(name for name in written.keys() | held.keys() if written.get(name) != held.get(name))
    return f"adapter of {odd[0]}: the checksums differ from the written ones" if odd else ""


def _sum(values: Tensor) -> str:
    """Return the checksum of `values` [...] as text."""
    return str(checksum(values.cpu().contiguous()))


_locks: dict[Path, int] = {}  # folder of a trainer -> the descriptor of its lock


def store(owner: str, adapter: str, unused: list[str], name: str, data: str, last: bool) -> None:
    """Append `data`, in base64, to the file `name` of an adapter, which appears complete with the `last` part.

    The adapter is the folder `adapter` in the folder `owner`, named as on the trainer's host. The `unused` adapters are
    removed. Every worker of a host writes the same file. Raises OSError when it cannot, ValueError for another name.
    """
    if not owner_in(owner, FOLDER) or any(os.sep in part or part.startswith(".") for part in (adapter, name, *unused)):
        raise ValueError(f"{owner}/{adapter}/{name} is no name of an adapter's file")
    folder = SHARED_MEMORY / owner
    _hold(folder)
    for other in unused:
        remove_tree(folder / other)
    (folder / adapter).mkdir(exist_ok=True)
    part = folder / adapter / f".{name}.{os.getpid()}"
    with part.open("ab") as file:
        file.write(base64.b64decode(data))
    if last:
        part.replace(folder / adapter / name)


def _hold(folder: Path) -> None:
    """Create `folder` and lock it while this process lives: the next start on this host removes it afterwards, see
    `ownership.py`. Folders of earlier trainers are removed."""
    if folder in _locks:
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = open_lock(folder / OWNER_LOCK)
    with contextlib.suppress(OSError):  # the trainer is on this host, and has locked it
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.write(lock, f"{os.getpid()}\n".encode())
    while _locks:
        earlier, held = _locks.popitem()
        remove_tree(earlier)
        os.close(held)
    _locks[folder] = lock
