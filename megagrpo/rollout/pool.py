"""Generation that runs ahead of training: groups of responses that are asked for early and picked up when their step comes.

A group is asked for at most `max_staleness` steps before the step that trains on it, and every step is followed by one weight sync: so
no token is older than that many weight versions, unless something held its group up. Such a group is not handed out, but generated again.

Groups are handed out in the order in which their prompts are drawn, whichever finishes first. So a run trains on the same prompts in the
same order whatever the timing; `max_staleness` steps of other groups hide a slow one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence

from megagrpo.rollout.engine import Engine, OnGroup
from megagrpo.types import Prompt, Rollout, SamplingParams


class AsyncPool:
    """`ask` begins to generate in threads of its own, `generate` hands out. Prompts are known by their `place`. A context manager: leaving
    it interrupts the engine.

    `dropped` counts groups that were generated and not handed out: too old, or of a prompt that was passed over.
    """

    def __init__(self, engine: Engine, max_staleness: int):
        self.engine, self.max_staleness = engine, max_staleness
        self.dropped = 0
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._finished: dict[int, list[Rollout]] = {}
        self._passed = -1  # the greatest place that was handed out
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._idle, self._since = 0.0, time.monotonic()
        self._measured = self._since

    def __enter__(self) -> AsyncPool:
        return self

    def __exit__(self, *exc) -> None:
        self.engine.interrupt()
        for thread in self._threads:
            thread.join()

    @property
    def asked(self) -> set[int]:
        """Places of the prompts that were asked for and not yet handed out."""
        with self._changed:
            return self._under_way | self._finished.keys()

    def ask(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int) -> None:
        """Begin with `n` rollouts of each prompt, and return at once."""
        if not prompts:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._changed:
            self._count_idle()
            self._under_way |= {prompt.place for prompt in prompts}
        thread = threading.Thread(target=self._work, args=(list(prompts), n, sampling, seed), name="pool", daemon=True)
        self._threads.append(thread)
        thread.start()

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        """`n` rollouts of each prompt, in the order of `prompts`, as `Engine.generate`; at once where they were asked for early enough.
        `sampling` and `seed` are for those that were not. What failed in the background is raised here."""
        asked = self.asked
        self.ask([prompt for prompt in prompts if prompt.place not in asked], n, sampling, seed)
        groups: list[list[Rollout] | None] = [None] * len(prompts)
        missing = {prompt.place: i for i, prompt in enumerate(prompts)}
        while missing:
            ready = self._await_any(missing)
            old = [place for place, group in ready.items() if self._is_too_old(group)]
            for place in ready.keys() - old:
                i = missing.pop(place)
                groups[i] = ready[place]
                if on_group is not None:
                    on_group(i, groups[i])
            self._drop(old)
            self.ask([prompts[missing[place]] for place in old], n, sampling, seed)
        self._drop([place for place in self._hand_out(prompts) if place <= self._passed])
        return groups

    def counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._changed:
            dropped, self.dropped = self.dropped, 0
        return {"async/dropped": float(dropped)}

    def measured(self) -> dict[str, float]:
        """Since the last call: the share of time in which nothing was under way (`idle/servers`); now: groups that are, and that wait."""
        with self._changed:
            self._count_idle()
            now = time.monotonic()
            share, self._idle, self._measured = self._idle / max(now - self._measured, 1e-9), 0.0, now
            return {
                "idle/servers": share,
                "async/in_flight": float(len(self._under_way)),
                "async/waiting": float(len(self._finished)),
            }

    def _await_any(self, places: Container[int]) -> dict[int, list[Rollout]]:
        """Those of `places` that are finished, at least one."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or any(place in places for place in self._finished))
            if self._failure is not None:
                failure, self._failure = self._failure, None  # of what can be mended, the caller may try again
                raise failure
            return {place: group for place, group in self._finished.items() if place in places}

    def _is_too_old(self, group: Sequence[Rollout]) -> bool:
        return min(rollout.weight_version for rollout in group) < self.engine.weight_version - self.max_staleness

    def _hand_out(self, prompts: Sequence[Prompt]) -> list[int]:
        """Forget the groups of `prompts`, which are the caller's from here on; the places of those that are left."""
        with self._changed:
            for prompt in prompts:
                del self._finished[prompt.place]
                self._passed = max(self._passed, prompt.place)
            return list(self._finished)

    def _drop(self, places: Sequence[int]) -> None:
        """Forget groups that are too old, or of prompts that will never be drawn, for the curriculum has passed them over."""
        with self._changed:
            for place in places:
                del self._finished[place]
            self.dropped += len(places)

    def _work(self, prompts: list[Prompt], n: int, sampling: SamplingParams, seed: int) -> None:
        try:
            self.engine.generate(prompts, n, sampling, seed, lambda i, group: self._keep(prompts[i].place, group))
        except BaseException as error:
            with self._changed:
                self._count_idle()
                self._under_way -= {prompt.place for prompt in prompts}
                self._failure = self._failure or error
                self._changed.notify_all()

    def _keep(self, place: int, group: list[Rollout]) -> None:
        with self._changed:
            self._count_idle()
            self._under_way.discard(place)
            if place > self._passed:
                self._finished[place] = group
            else:
                self.dropped += 1
            self._changed.notify_all()

    def _count_idle(self) -> None:
        """To be called, with the lock held, before what is under way changes."""
        now = time.monotonic()
        if not self._under_way:
            self._idle += now - self._since
        self._since = now
