"""Asynchronous generation: groups of responses are requested before training, scored, and collected at their step.

A group is requested at most `max_staleness` steps before the step that trains on it, and each step ends with one weight
sync. So no token is older than `max_staleness` weight versions, unless its group was delayed. A group that is too old
is dropped and generated again.

Groups start and are handed out in the order of drawn prompts, whichever finishes first. So a run trains on the same
prompts in the same order, whatever the timing. `max_staleness` steps of other groups hide a slow group's latency.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Container, Generator, Sequence
from dataclasses import replace
from typing import Any

from megagrpo.engine.http.protocol import AheadGenerator
from megagrpo.records.rows.packed_groups import packed, unpacked
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.rollout.scored_groups import ScoredGroup, begin_scoring
from megagrpo.types import Prompt, Rollout, SamplingParams


class AsyncPool:
    """Generates groups in background threads: `ask` requests, `groups` hands out. Prompts are identified by `position`.

    Each group is scored as soon as it is finished. If no group finishes for `straggler_seconds`, the groups that
    `groups` waits for are truncated. A context manager: leaving it interrupts the engine.
    """

    def __init__(
        self, engine: AheadGenerator, rewards: RewardScorer, max_staleness: int, straggler_seconds: float | None = None
    ):
        self.engine, self.rewards, self.max_staleness, self.straggler_seconds = (
            engine,
            rewards,
            max_staleness,
            straggler_seconds,
        )
        self._counted: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._finished: dict[int, ScoredGroup] = {}  # by position
        self._restored: dict[int, dict[str, Any]] = {}  # groups of `load_state_dict` that were not requested yet
        self._passed = -1  # the highest position that was handed out
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._begun: threading.Event | None = None  # set when the engine works on all requested prompts
        self._idle, self._since = 0.0, time.monotonic()
        self._measured = self._since

    def __enter__(self) -> AsyncPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.interrupt()
        for thread in self._threads:
            thread.join()

    @property
    def asked(self) -> set[int]:
        """Places of the prompts that were requested and not handed out yet."""
        with self._changed:
            return self._under_way | self._finished.keys()

    def ask(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int, at_once: bool = False
    ) -> None:
        """Request `n` rollouts of each prompt; returns immediately.

        Generation starts when the engine works on all prompts requested before, or immediately with `at_once`. Groups
        kept in a checkpoint are used instead of new ones. `step` has the meaning of `RewardScorer.begin`.
        """
        prompts = [prompt for prompt in prompts if not self._restore(prompt, n, step)]
        if not prompts:
            return
        before, begun = None if at_once else self._begun, threading.Event()
        self._begun = self._begun if at_once else begun
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._changed:
            self._count_idle()
            self._under_way |= {position_of(prompt) for prompt in prompts}
        thread = threading.Thread(
            target=self._work, args=(prompts, n, sampling, seed, step, before, begun), name="pool", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def groups(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int
    ) -> Generator[ScoredGroup]:
        """Yield `n` rollouts of each prompt; see `GroupSource.groups`. The groups stay here until the last one was
        yielded, so that a call that failed can be repeated.

        `sampling`, `seed` and `step` apply to prompts not requested before. A background thread's error is raised here.
        """
        requested = self.asked
        self.ask([p for p in prompts if p.position not in requested], n, sampling, seed, step, at_once=True)
        missing = {position_of(prompt): prompt for prompt in prompts}
        indices = {position: index for index, position in enumerate(missing)}
        while missing:
            if not (ready := self._await_any(missing)):
                self._counted["cut"] += len(missing)
                self.engine.cut(missing)
            old = [missing[position] for position, group in ready.items() if self._is_too_old(group.rollouts)]
            self._drop([position_of(prompt) for prompt in old])
            self.ask(old, n, sampling, seed, step, at_once=True)
            for position in ready.keys() - {position_of(prompt) for prompt in old}:
                del missing[position]
                yield replace(ready[position], index=indices[position])
        self._drop(self._hand_out(prompts))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the groups that are finished and not handed out, as JSON values. Rewards are left out, because they
        are computed again. In-flight groups are left out too: they are requested again."""
        with self._changed:
            return [{"place": position} | packed(group.rollouts) for position, group in sorted(self._finished.items())]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore the groups of `state`; each is used when its prompt is requested. Call this before the first sync of
        a resumed run, because that sync gives the checkpoint's weights the next version."""
        self._restored = {group["place"]: group for group in state}

    def counters(self) -> dict[str, float]:
        """Return and reset the counts of dropped and truncated groups."""
        with self._changed:
            counted, self._counted = self._counted, Counter()
        return {f"async/{name}": float(counted[name]) for name in ("dropped", "cut")}

    def measured(self) -> dict[str, float]:
        """Return the share of time since the last call without any in-flight group (`idle/servers`), and the current
        numbers of in-flight and of waiting groups."""
        with self._changed:
            self._count_idle()
            now = time.monotonic()
            share, self._idle, self._measured = self._idle / max(now - self._measured, 1e-9), 0.0, now
            return {
                "idle/servers": share,
                "async/in_flight": float(len(self._under_way)),
                "async/waiting": float(len(self._finished)),
            }

    def _restore(self, prompt: Prompt, n: int, step: int) -> bool:
        """Whether a checkpoint kept `n` rollouts of the prompt. If so, the group counts as finished."""
        saved = self._restored.pop(position_of(prompt), None)
        if saved is None or (saved["prompt_id"], len(saved["rollouts"])) != (prompt.prompt_id, prompt.group_size(n)):
            return False
        with self._changed:
            # a resumed run syncs the checkpoint's weights as the next version
            self._finish(position_of(prompt), unpacked(saved, prompt, later=1), step)
        return True

    def _await_any(self, positions: Container[int]) -> dict[int, ScoredGroup]:
        """Wait until one of `positions` is finished. Returns all that are, or nothing after `straggler_seconds`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or any(position in positions for position in self._finished),
                self.straggler_seconds,
            )
            if self._failure is not None:
                failure, self._failure = self._failure, None  # cleared, because the caller may retry after some errors
                raise failure
            return {position: group for position, group in self._finished.items() if position in positions}

    def _is_too_old(self, group: Sequence[Rollout]) -> bool:
        versions = (sample.weight_version for rollout in group for sample in (rollout, *rollout.branches))
        return min(versions) < self.engine.weight_version - self.max_staleness

    def _hand_out(self, prompts: Sequence[Prompt]) -> list[int]:
        """Remove the groups of `prompts`. Returns positions of finished groups before them, which are never drawn."""
        with self._changed:
            self._passed = max([self._passed, *map(position_of, prompts)])
            for prompt in prompts:
                del self._finished[position_of(prompt)]
            return [position for position in self._finished if position <= self._passed]

    def _drop(self, positions: Sequence[int]) -> None:
        """Drop groups that are too old, or whose prompts the curriculum has skipped so that they are never drawn."""
        with self._changed:
            for position in positions:
                self._finished.pop(position).scoring.drop()
            self._counted["dropped"] += len(positions)

    def _work(
        self,
        prompts: list[Prompt],
        n: int,
        sampling: SamplingParams,
        seed: int,
        step: int,
        before: threading.Event | None,
        begun: threading.Event,
    ) -> None:
        if before is not None:
            before.wait()
        try:
            for index, group in self.engine.groups(prompts, n, sampling, seed, begun.set):
                self._keep(position_of(prompts[index]), group, step)
        except BaseException as error:
            with self._changed:
                self._count_idle()
                self._under_way -= {position_of(prompt) for prompt in prompts}
                self._failure = self._failure or error
                self._changed.notify_all()
        finally:
            begun.set()

    def _keep(self, position: int, group: list[Rollout], step: int) -> None:
        with self._changed:
            self._count_idle()
            self._under_way.discard(position)
            if position > self._passed:
                self._finish(position, group, step)
            else:
                self._counted["dropped"] += 1
            self._changed.notify_all()

    def _finish(self, position: int, group: list[Rollout], step: int) -> None:
        """Start to score a finished group. The caller holds the lock."""
        self._finished[position] = begin_scoring(self.rewards, position, group, step)

    def _count_idle(self) -> None:
        """Add up the time without in-flight groups. The caller holds the lock, before in-flight groups change."""
        now = time.monotonic()
        if not self._under_way:
            self._idle += now - self._since
        self._since = now


def position_of(prompt: Prompt) -> int:
    """Return the prompt's index in the run's stream. Every prompt that is requested ahead has one."""
    assert prompt.position is not None, f"prompt {prompt.prompt_id} is not from the run's stream"
    return prompt.position
