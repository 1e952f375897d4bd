"""What the trainer asks of an engine, and how an engine fails.

`VllmEngine` is the one that ships. The protocol is what `trainer/` and `weight_sync/` call, so another engine is another class with
these methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from megagrpo.transfer.manifest import Manifest, WeightSyncError
from megagrpo.types import Prompt, Rollout, SamplingParams


class EngineError(RuntimeError):
    """The engine did something it must not do; the message names the server."""


class EngineStartError(EngineError):
    """A server could not start; the message names its log file and shows its end."""


class EngineDeadError(EngineError):
    """No server is left to answer; the message names their addresses and log files."""


class EngineInterrupted(EngineError):
    """Somebody called `interrupt` while responses were generated."""


class ServerDied(WeightSyncError):
    """A server died while it took in an update that all of its servers must get. Others are left or it is started again: doing it over may
    succeed."""


class EngineStarved(EngineError):
    """No server is left that has the current weights, and one is back that can get them only when all ranks give them: they must, and then
    it can be asked again."""


OnGroup = Callable[[int, list[Rollout]], None]


class WeightUpdate(Protocol):
    """New weights, as an engine sees them: how each of its servers gets at them, and what its workers say about them."""

    manifest: Manifest
    servers: Collection[str] | None  # that it is for, all of them or none; None: whoever is there, now or until the next but one is made

    def request(self, server: str) -> dict[str, Any]:
        """What the workers of the server at this address are told."""

    def replies(self, server: str) -> list[dict[str, Any]]:
        """What they have reported so far: `worker` with an `error`, or with the `version`, `bytes`, `checksum_seconds` and what else the
        update's own way takes as proof."""

    def standing(self, server: str) -> dict[str, str]:
        """Worker -> where it stands, of those that have not reported yet; as far as that is known."""


class Engine(Protocol):
    """Generates responses and takes new weights."""

    weight_version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_group: OnGroup | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, in the order of `prompts`. The same arguments and weights give the same tokens.

        `on_group` gets each prompt's place and rollouts as soon as they are there; `on_begun` is called, once or more often, when servers
        work on all of them and have room for more. Neither must block."""

    def extend(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], seeds: Sequence[int]) -> list[Rollout]:
        """One rollout of each prompt, with limits and a seed of its own, in order."""

    def read_tool_calls(self, turns: Sequence[Sequence[int]], tools: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, str]]]]:
        """What stands outside of the tool calls in each turn's token ids, and the calls: a name, and arguments as JSON text."""

    def interrupt(self) -> None:
        """Have the `generate` that is under way, and every later one, raise EngineInterrupted. May be called from a signal handler."""

    def cut(self, places: Collection[int]) -> None:
        """Have the responses to prompts at these places that are under way end with the tokens that they have."""

    def workers(self) -> dict[str, int]:
        """The address of each server that answers, and how many workers it has; waits for one that is started again where none does."""

    def load_weights(self, update: WeightUpdate, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Take in the weights of `update` and stay paused; what each worker reports about it, with `server` and `worker` added. `only`
        names the servers that are meant; None is all. ServerDied when one died that `update` is for."""

    def resume(self, update: WeightUpdate, only: Sequence[str] | None = None) -> None:
        """Serve again, with the weights of `update`, which the trainer has verified. Fails as `load_weights` does."""

    def load_adapter(self, folder: Path, version: int, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Take in the adapter in `folder`; per worker `server`, `worker` and the checksums (`sums`) of what it holds."""

    def use_adapter(self, version: int) -> None:
        """Sample with the adapter that the trainer has verified to be `version` from here on, and forget the one before."""

    def close(self) -> None:
        """Let go of connections."""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else (neither the process nor the Python version)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
