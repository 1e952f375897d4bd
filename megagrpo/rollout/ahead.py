"""Generation that runs ahead of training: groups of responses that are asked for early, scored, and picked up when their step comes.

A group is asked for at most `max_staleness` steps before the step that trains on it, and every step is followed by one weight sync: so
no token is older than that many weight versions, unless something held its group up. Such a group is not handed out, but generated again.

Groups are begun and handed out in the order in which their prompts are drawn, whichever finishes first. So a run trains on the same prompts
in the same order whatever the timing; `max_staleness` steps of other groups hide a slow one.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from megagrpo.engine.protocol import Engine
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.rewards.scoring import Scoring
from megagrpo.types import Prompt, Rollout, SamplingParams


class Finished(NamedTuple):
    """A group, and its rewards, which are under way or there."""

    rollouts: list[Rollout]
    scoring: Scoring


class AsyncPool:
    """`ask` begins to generate in threads of its own, `take` hands out. Each group is scored from when it is finished. Prompts are known by
    their `place`. A context manager: leaving it interrupts the engine.

    What it waits for without a group for `straggler_seconds` is cut.
    """

    def __init__(self, engine: Engine, rewards: RewardScorer, max_staleness: int, straggler_seconds: float | None = None):
        self.engine, self.rewards, self.max_staleness, self.straggler_seconds = engine, rewards, max_staleness, straggler_seconds
        self._counted = Counter()
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self._finished: dict[int, Finished] = {}
        self._restored: dict[int, dict[str, Any]] = {}  # groups of `load_state_dict` that were not asked for yet
        self._passed = -1  # the greatest place that was handed out
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._begun: threading.Event | None = None  # set when the engine works on all that was asked for
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

    def ask(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int, at_once: bool = False) -> None:
        """Begin with `n` rollouts of each prompt, when the engine works on all that was asked for before, or `at_once`; returns
        immediately. Those that a checkpoint has kept are there already. `step` as in `RewardScorer.begin`."""
        prompts = [prompt for prompt in prompts if not self._restore(prompt, n, step)]
        if not prompts:
            return
        before, begun = None if at_once else self._begun, threading.Event()
        self._begun = self._begun if at_once else begun
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._changed:
            self._count_idle()
            self._under_way |= {prompt.place for prompt in prompts}
        thread = threading.Thread(target=self._work, args=(prompts, n, sampling, seed, step, before, begun), name="pool", daemon=True)
        self._threads.append(thread)
        thread.start()

    def take(self, prompts: Sequence[Prompt], n: int, sampling: SamplingParams, seed: int, step: int) -> list[Scoring]:
        """The scoring of `n` rollouts of each prompt, in the order of `prompts`, to be finished; at once where they were asked for early
        enough. `sampling`, `seed` and `step` are for those that were not. What failed in the background is raised here."""
        asked = self.asked
        self.ask([prompt for prompt in prompts if prompt.place not in asked], n, sampling, seed, step, at_once=True)
        missing = {prompt.place: prompt for prompt in prompts}
        while missing:
            if not (ready := self._await_any(missing)):
                self._counted["cut"] += len(missing)
                self.engine.cut(missing)
            old = [missing[place] for place, group in ready.items() if self._is_too_old(group.rollouts)]
            for place in ready:
                del missing[place]
            self._drop([prompt.place for prompt in old])
            self.ask(old, n, sampling, seed, step, at_once=True)
            missing |= {prompt.place: prompt for prompt in old}
        scorings, left = self._hand_out(prompts)
        self._drop([place for place in left if place <= self._passed])
        return scorings

    def state_dict(self) -> list[dict[str, Any]]:
        """The groups that are finished and not handed out, as values for JSON, without rewards, which are computed again. What is under way
        is not kept: it is asked for again."""
        with self._changed:
            return [packed(place, group.rollouts) for place, group in sorted(self._finished.items())]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Hand out the groups of `state` when their prompts are asked for. To be called before the sync that begins a resumed run: it
        gives the weights of the checkpoint the next version."""
        self._restored = {group["place"]: group for group in state}

    def counters(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._changed:
            counted, self._counted = self._counted, Counter()
        return {f"async/{name}": float(counted[name]) for name in ("dropped", "cut")}

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

    def _restore(self, prompt: Prompt, n: int, step: int) -> bool:
        """Whether a checkpoint has kept `n` rollouts of the prompt; they are finished then."""
        kept = self._restored.pop(prompt.place, None)
        if kept is None or (kept["prompt_id"], len(kept["rollouts"])) != (prompt.prompt_id, n):
            return False
        with self._changed:
            self._finish(prompt.place, unpacked(kept, prompt), step)
        return True

    def _await_any(self, places: Container[int]) -> dict[int, Finished]:
        """Those of `places` that are finished, as soon as there is one; none after `straggler_seconds`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or any(place in places for place in self._finished), self.straggler_seconds
            )
            if self._failure is not None:
                failure, self._failure = self._failure, None  # of what can be mended, the caller may try again
                raise failure
            return {place: group for place, group in self._finished.items() if place in places}

    def _is_too_old(self, group: Sequence[Rollout]) -> bool:
        return min(rollout.weight_version for rollout in group) < self.engine.weight_version - self.max_staleness

    def _hand_out(self, prompts: Sequence[Prompt]) -> tuple[list[Scoring], list[int]]:
        """The groups of `prompts`, which are the caller's from here on, and the places of those that are left."""
        with self._changed:
            self._passed = max([self._passed, *(prompt.place for prompt in prompts)])
            return [self._finished.pop(prompt.place).scoring for prompt in prompts], list(self._finished)

    def _drop(self, places: Sequence[int]) -> None:
        """Forget groups that are too old, or of prompts that will never be drawn, for the curriculum has passed them over."""
        with self._changed:
            for place in places:
                self._finished.pop(place).scoring.drop()
            self._counted["dropped"] += len(places)

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
            self.engine.generate(prompts, n, sampling, seed, lambda i, group: self._keep(prompts[i].place, group, step), begun.set)
        except BaseException as error:
            with self._changed:
                self._count_idle()
                self._under_way -= {prompt.place for prompt in prompts}
                self._failure = self._failure or error
                self._changed.notify_all()
        finally:
            begun.set()

    def _keep(self, place: int, group: list[Rollout], step: int) -> None:
        with self._changed:
            self._count_idle()
            self._under_way.discard(place)
            if place > self._passed:
                self._finish(place, group, step)
            else:
                self._counted["dropped"] += 1
            self._changed.notify_all()

    def _finish(self, place: int, group: list[Rollout], step: int) -> None:
        """Begin to score a group. To be called with the lock held."""
        scoring = self.rewards.begin(step)
        scoring.add(0, group)
        self._finished[place] = Finished(group, scoring)

    def _count_idle(self) -> None:
        """To be called, with the lock held, before what is under way changes."""
        now = time.monotonic()
        if not self._under_way:
            self._idle += now - self._since
        self._since = now


def packed(place: int, group: Sequence[Rollout]) -> dict[str, Any]:
    """A group as values for JSON, the rows of numbers in base64: tokens as int32, log-probs as float64."""
    rollouts = [
        vars(rollout)
        | {"response_ids": _encoded(rollout.response_ids, np.int32), "rollout_logprobs": _encoded(rollout.rollout_logprobs, np.float64)}
        for rollout in group
    ]
    for rollout in rollouts:
        del rollout["prompt"], rollout["dialogue"]
    return {"place": place, "prompt_id": group[0].prompt.prompt_id, "rollouts": rollouts}


def unpacked(kept: dict[str, Any], prompt: Prompt) -> list[Rollout]:
    """The group again, with weight versions as a resumed run counts them: those of the checkpoint were synced once more."""
    return [
        Rollout(
            prompt,
            tuple(np.frombuffer(base64.b64decode(rollout["response_ids"]), np.int32).tolist()),
            tuple(np.frombuffer(base64.b64decode(rollout["rollout_logprobs"]), np.float64).tolist()),
            rollout["finish_reason"],
            rollout["weight_version"] + 1,
            rollout["text"],
            later_versions=tuple((start, version + 1) for start, version in rollout["later_versions"]),
        )
        for rollout in kept["rollouts"]
    ]


def _encoded(values: Sequence[float], kind: type) -> str:
    return base64.b64encode(np.array(values, kind).tobytes()).decode()
