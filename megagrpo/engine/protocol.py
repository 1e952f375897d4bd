"""The interface between the trainer and an engine: methods and errors.

`VllmEngine` is the engine that ships. `trainer/` and `sync/` call only the methods of `Engine`, so another engine is
another class with these methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from megagrpo.sync.wire.manifest import Manifest, WeightSyncError
from megagrpo.types import Prompt, Rollout, SamplingParams


class EngineError(RuntimeError):
    """The engine failed or returned something invalid; the message names the server."""


class EngineStartError(EngineError):
    """A server could not start; the message names its log file and shows the end of it."""


class EngineDeadError(EngineError):
    """No server responds any longer; the message names their addresses and log files."""


class EngineInterrupted(EngineError):
    """`interrupt` was called while responses were generated."""


class ServerDied(WeightSyncError):
    """A server died during an update that all of its servers must get. A retry may succeed, with the other servers or
    after a restart."""


class EngineStarved(EngineError):
    """No live server has the current weights, and at least one can only get them when all ranks push them. After such a
    push, retry."""


OnGroup = Callable[[int, list[Rollout]], None]


class WeightUpdate(Protocol):
    """New weights as an engine sees them: what each server's workers need to load them, and what those workers
    report."""

    @property
    def manifest(self) -> Manifest:
        """The version and the tensors of the update."""

    @property
    def servers(self) -> Collection[str] | None:
        """The servers that must all get the update. None: every live server, including any that returns before the
        update after next."""

    def request(self, server: str) -> dict[str, Any]:
        """The load instructions for the workers of the server at this address."""

    def replies(self, server: str) -> list[dict[str, Any]]:
        """The workers' reports so far. Each has `worker` and either `error`, or `version`, `bytes`, `checksum_seconds`
        and what the update's transport needs as proof."""

    def reports_by_http(self, server: str) -> bool:
        """Whether this process must request the workers' reports from the server, because it cannot read them
        itself."""

    def activity(self, server: str) -> dict[str, str]:
        """Worker -> the operation it is in, for workers that have not reported yet, as far as known."""


class Generator(Protocol):
    """Generates responses: a vLLM engine, or one whose rollouts have several turns."""

    weight_version: int

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """Generate `n` rollouts of each prompt, in the order of `prompts`. The same arguments and weights give the same
        tokens.

        `on_group` is called with each prompt's index and rollouts as soon as they are finished. It must not block.
        """

    def interrupt(self) -> None:
        """Make the running and every later `generate` raise EngineInterrupted. May be called from a signal handler."""


class Engine(Generator, Protocol):
    """Generates responses and loads new weights."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_group: OnGroup | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> list[list[Rollout]]:
        """Generate as `Generator` does. `on_begun` is called, possibly more than once, when servers work on all prompts
        and have room for more. It must not block."""

    def extend(
        self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Rollout]:
        """Generate one rollout of each prompt, in order, each with its own limits and seed."""

    def read_tool_calls(
        self, turns: Sequence[Sequence[int]], tools: Sequence[dict[str, Any]]
    ) -> list[tuple[str, list[dict[str, str]]]]:
        """Return, for each turn's token ids, the text outside of the tool calls, and the calls: name, and arguments as
        JSON text."""

    def cut(self, places: Collection[int]) -> None:
        """Truncate the in-flight responses to prompts at these places: they end with the tokens generated so far."""

    def workers(self) -> dict[str, int]:
        """Return the address of each live server and its number of workers. Without a live server, wait for a
        restart."""

    def load_weights(self, update: WeightUpdate, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Load the weights of `update` and stay paused. Returns each worker's report with `server` and `worker` added.
        `only` names the servers to update; None means all. Raises ServerDied when a server died that must get
        `update`."""

    def resume(self, update: WeightUpdate, only: Sequence[str] | None = None) -> None:
        """Serve again, with the weights of `update`, which the trainer has verified. Raises the errors of
        `load_weights`."""

    def load_adapter(self, folder: Path, version: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Load the adapter in `folder`. Returns `server`, `worker` and the loaded tensors' checksums (`sums`) for each
        worker."""

    def use_adapter(self, version: int) -> None:
        """Sample with the adapter of `version`, which the trainer has verified, from here on, and unload the previous
        adapter."""

    def close(self) -> None:
        """Close all connections."""


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from all parts. The seed depends on nothing else, such as the process or the Python
    version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
