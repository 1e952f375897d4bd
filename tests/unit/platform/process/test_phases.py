"""The phases of a step: seconds, progress and ranges of a profile from one context."""

from contextlib import contextmanager

import pytest

from megagrpo.platform.process.phases import Phases


class Shown:
    """A progress that lists what is reported to it."""

    draws = True

    def __init__(self):
        self.events = []

    @contextmanager
    def task(self, title):
        self.events.append(f"begin {title}")
        yield self
        self.events.append(f"end {title}")

    def expect(self, total, unit, done=0):
        self.events.append(f"expect {total} {unit}")

    def advance(self, count=1, tokens=0):
        self.events.append(f"advance {count} {tokens}")


def test_phases_add_up_also_when_one_raises(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0, 15.0, 20.0, 24.0, 30.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    phases = Phases()
    with phases("generate"):
        pass
    with pytest.raises(KeyError), phases("train"):
        raise KeyError
    with phases("generate"):
        pass
    assert phases.collect() == {"time/generate": 6.0, "time/train": 5.0, "time/step": 30.0}
    assert phases.collect() == {"time/step": 1.0}


def test_a_phase_inside_another_one_counts_in_both_and_shares_its_progress():
    shown, marks = Shown(), []

    @contextmanager
    def mark(name):
        marks.append(name)
        yield
        marks.append(f"end of {name}")

    phases = Phases(shown)
    phases.mark, phases.about = mark, "step 3/40 "
    with phases("train") as task:
        task.expect(4, "micro-batches")
        phases.task.advance()
        with phases("optimizer"):
            phases.task.advance(2)
    phases.task.advance()  # no phase runs
    assert shown.events == [
        "begin step 3/40 train",
        "expect 4 micro-batches",
        "advance 1 0",
        "advance 2 0",
        "end step 3/40 train",
    ]
    assert marks == ["train", "optimizer", "end of optimizer", "end of train"]
    times = phases.collect()
    assert 0 < times["time/optimizer"] <= times["time/train"] <= times["time/step"]


def test_a_phase_that_raises_ends_and_the_next_one_has_its_own_progress():
    shown = Shown()
    shown.task = contextmanager(lambda title: (yield shown.events.append(title)))
    phases = Phases(shown)
    for name in ("generate", "train"):
        with pytest.raises(KeyError), phases(name):
            raise KeyError
    assert shown.events == ["generate", "train"]
