"""A distributed checkpoint on its way to the disk, of which a rank can write its part while it computes other things."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.bridge.checksums import checksums

from megatron.core import dist_checkpointing  # isort: skip  (after megagrpo.device, which prepares the platform)


class ShardedWrite:
    """This rank's part of `state` in `folder`. Making one is collective, and so is `finish`; between them each rank writes for itself."""

    def __init__(self, state: dict[str, Any], folder: Path, metadata: dict[str, Any], background: bool):
        """In the `background`, the numbers of now are copied to host memory and written by a thread; else they are written here."""
        self._folder, self._error = folder, None
        self.ended = 0.0  # when this rank's part was written, as time.monotonic() counts
        self._checksums: dict[str, str] = {}
        options = dict(content_metadata=metadata, async_sharded_save=True)
        # The default strategy needs a package that does not install everywhere.
        with _failures_as_os_errors():
            self._request = dist_checkpointing.save(state, str(folder), **options, async_strategy="mcore")
        _to_host(self._tensors, copy=background)
        # A daemon: a process that is told to end at once leaves the checkpoint unfinished.
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start() if background else self._run()

    @property
    def done(self) -> bool:
        """Whether this rank's part is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until this rank writes no more."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> dict[str, str]:
        """The checksums of this rank's files, once they are written; raises what kept them from it."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._checksums

    def finish(self) -> None:
        """Write what makes the folder a distributed checkpoint. OSError on every rank when one could not write its part; the first rank
        alone knows which."""
        with _failures_as_os_errors():
            for finalize in self._request.finalize_fns:
                finalize()

    @property
    def _tensors(self) -> list[list[tuple[Any, torch.Tensor]]]:
        """What this rank writes, one list for each of its files; the writer looks at these lists again."""
        buckets = self._request.async_fn_args[1] if self._request.async_fn is not None else []
        return [tensors for _, _, (_, tensors) in buckets]

    def _run(self) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._request.async_fn_args)
                for tensors in self._tensors:
                    tensors.clear()  # they would live until `finish`
                rank = torch.distributed.get_rank()
                self._checksums = checksums(self._folder, self._folder.glob(f"__{rank}_*.distcp"))
        except Exception as error:
            self._error = error
        self.ended = time.monotonic()


@contextmanager
def _failures_as_os_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # no Exception to Python
        who = ", ".join(f"rank {rank}" for rank in error.failures) or "a rank"
        raise OSError(f"{who} could not write its part (the log says more)") from error


def _to_host(lists: list[list[tuple[Any, torch.Tensor]]], copy: bool) -> None:
    """Replace every tensor by itself in host memory, by a copy of its own if asked: what it replaces is freed one by one."""
    for tensors in lists:
        for i, (item, tensor) in enumerate(tensors):
            tensors[i] = item, tensor.to("cpu", copy=copy)
            del tensor
