"""Writes a distributed checkpoint; each rank can write its part in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megagrpo.models.bridge.file_checksums import checksums


class ShardedWrite:
    """The write of this rank's part of `state` to `folder`. Construction and `finish` are collective; in between each
    rank writes on its own."""

    def __init__(self, state: dict[str, Any], folder: Path, metadata: dict[str, Any], background: bool):
        """Start the write. With `background`, the current values are copied to host memory and a thread writes them;
        otherwise this call writes."""
        self._folder = folder
        self._error: Exception | None = None
        self.ended = 0.0  # time.monotonic() at the end of this rank's write
        self._checksums: dict[str, str] = {}
        # The default strategy needs a package that cannot be installed everywhere.
        with _failures_as_os_errors():
            self._request = dist_checkpointing.save(
                state, str(folder), content_metadata=metadata, async_sharded_save=True, async_strategy="mcore"
            )
        _to_host(self._tensors, copy=background)
        # A daemon thread: a process that must exit at once leaves the checkpoint unfinished.
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start() if background else self._run()

    @property
    def done(self) -> bool:
        """Whether this rank's part is written, or its write has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank's write ends."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> dict[str, str]:
        """Wait for the write and return the checksums of this rank's files. Raises the error of a failed write."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._checksums

    def finish(self) -> None:
        """Write the files that complete the distributed checkpoint. Raises OSError on every rank when a rank could not
        write its part;
        only rank 0 knows which rank failed."""
        with _failures_as_os_errors():
            for finalize in self._request.finalize_fns:
                finalize()

    @property
    def _tensors(self) -> list[list[tuple[Any, torch.Tensor]]]:
        """The tensors that this rank writes, one list per file. The writer reads these same list objects."""
        buckets = self._request.async_fn_args[1] if self._request.async_fn is not None else []
        return [tensors for _, _, (_, tensors) in buckets]

    def _run(self) -> None:
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._request.async_fn_args)
                for tensors in self._tensors:
                    tensors.clear()  # otherwise the tensors would live until `finish`
                rank = torch.distributed.get_rank()
                self._checksums = checksums(self._folder, self._folder.glob(f"__{rank}_*.distcp"))
        except Exception as error:
            self._error = error
        self.ended = time.monotonic()


@contextmanager
def _failures_as_os_errors() -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # CheckpointException is not a subclass of Exception
        who = ", ".join(f"rank {rank}" for rank in error.failures) or "a rank"
        raise OSError(f"{who} could not write its part (see the log)") from error


def _to_host(lists: list[list[tuple[Any, torch.Tensor]]], copy: bool) -> None:
    """Replace every tensor with one in host memory, a fresh copy if `copy`. Replaced tensors are freed one by one."""
    for tensors in lists:
        for i, (item, tensor) in enumerate(tensors):
            tensors[i] = item, tensor.to("cpu", copy=copy)
            del tensor
