"""What the engine shares with the trainer: its errors, the update that it loads, and the interface of a generator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Generator as Stream
from operator import itemgetter
from typing import Any, Protocol

from megagrpo.types import Prompt, Rollout, SamplingParams, WeightSyncError
from megagrpo.weights.slices.tensor_index import TensorIndex


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
    """No live server has current weights; at least one can only get them by a push of all ranks. Retry after it."""


Group = tuple[int, list[Rollout]]  # the index of a prompt in the call, and its rollouts


class WeightUpdate(Protocol):
    """New weights as an engine sees them: what each server's workers need to load them, and what workers report."""

    @property
    def index(self) -> TensorIndex:
        """The version and the tensors of the update."""

    @property
    def receiver(self) -> str:
        """The class that receives the update in vLLM's workers."""

    @property
    def servers(self) -> Mapping[str, int] | None:
        """The servers that must get the update. None: all live servers, and any back before the update after next."""

    def request(self, server: str) -> dict[str, Any]:
        """The load instructions for the workers of the server at this address."""

    def reports(self, server: str) -> list[dict[str, Any]] | None:
        """The workers' reports so far. Each has `worker` and either `error`, or `version`, `bytes`, `checksum_seconds`
        and what the update's transport needs as proof, or only the `activity` of a worker that has not reported. None:
        the server must be asked for them."""


class Generator(Protocol):
    """Generates responses: a vLLM engine, or one whose rollouts have several turns."""

    weight_version: int

    def groups(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> Stream[Group]:
        """Generate `n` rollouts of each prompt, and yield each group as soon as it is finished. The same arguments and
        weights give the same tokens.

        Responses are received only while the caller waits for the next group, so it must not work long in between.
        """

    def generate(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> list[list[Rollout]]:
        """Return the rollouts of `groups`, in the order of `prompts`."""
        return [rollouts for _, rollouts in sorted(self.groups(prompts, n, sampling, seed), key=itemgetter(0))]

    def interrupt(self) -> None:
        """Make the running and every later generation raise EngineInterrupted. May be called from a signal handler."""


class AheadGenerator(Generator, Protocol):
    """A generator that may generate in several threads, also during weight updates."""

    def groups(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Stream[Group]:
        """Like `Generator.groups`. `on_begun` is called, perhaps repeatedly, when the engine has room for more."""

    def cut(self, positions: Collection[int]) -> None:
        """Truncate responses in progress to the prompts with these `Prompt.position`s."""

    def leave_old_adapters(self) -> None:
        """Continue responses in progress with the current adapter if theirs is too old. Call it after each push."""


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from all parts and nothing else, such as the process or the Python version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
