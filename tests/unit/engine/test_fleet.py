"""The states of the servers: every cell of the table of transitions, and a sequential model of the reports of
two threads."""

import random
import sys
import threading
import time
from collections import Counter

import pytest

import megagrpo.engine.http.fleet as fleet_module
from megagrpo.engine.http.fleet import TRANSITIONS, Event, Fleet, State
from tests.unit.for_each import for_each

PATHS = {  # state -> the reports that bring server "a" of the servers "a" and "b" into it
    State.JOINING: lambda fleet: (fleet.follow(["b"]), fleet.follow(["a", "b"])),
    State.STARTING: lambda fleet: (fleet.died("a"), fleet.may_start("a")),
    State.SERVING: lambda fleet: None,
    State.SILENT: lambda fleet: fleet.silent("a"),
    State.EXCLUDED: lambda fleet: fleet.excluded("a"),
    State.NEEDS_WEIGHTS: lambda fleet: (fleet.silent("a"), fleet.needs_weights("a")),
    State.ENDED: lambda fleet: fleet.died("a"),
    State.DRAINING: lambda fleet: fleet.follow(["b"]),
    State.GONE: lambda fleet: (fleet.died("a"), fleet.gone("a")),
}
VERBS = {  # event -> (a state that allows it, the verb that reports it)
    Event.SILENT: (State.SERVING, lambda fleet: fleet.silent("a")),
    Event.EXCLUDED: (State.SERVING, lambda fleet: fleet.excluded("a")),
    Event.DIED: (State.SERVING, lambda fleet: fleet.died("a")),
    Event.STARTED: (State.ENDED, lambda fleet: fleet.may_start("a")),
    Event.GONE: (State.ENDED, lambda fleet: fleet.gone("a")),
    Event.READY: (State.SILENT, lambda fleet: fleet.ready("a", 0)),
    Event.FILLED: (State.STARTING, lambda fleet: fleet.filled("a", 0)),
    Event.WAITING: (State.SILENT, lambda fleet: fleet.needs_weights("a")),
    Event.SYNCED: (State.NEEDS_WEIGHTS, lambda fleet: (fleet.loaded("a", 1), fleet.synced(1))),
    Event.MISSED: (State.SERVING, lambda fleet: fleet.synced(1)),
    Event.NAMED: (State.DRAINING, lambda fleet: fleet.follow(["b", "a"])),
    Event.REMOVED: (State.SERVING, lambda fleet: fleet.follow(["b"])),
}


# a copy of the product's table, so that a cell changes only on purpose
EXPECTED = """
              silent excluded died  started  gone ready   filled  waiting       synced  missed named   removed
JOINING       -      JOINING  !     !        !    SERVING SERVING NEEDS_WEIGHTS -       -      !       GONE
STARTING      -      -        ENDED !        !    -       SERVING NEEDS_WEIGHTS -       -      !       !
SERVING       SILENT EXCLUDED ENDED !        !    -       -       -             SERVING SILENT !       DRAINING
SILENT        -      EXCLUDED ENDED !        !    SERVING SERVING NEEDS_WEIGHTS -       -      !       GONE
EXCLUDED      -      EXCLUDED ENDED !        !    SERVING SERVING NEEDS_WEIGHTS -       -      !       GONE
NEEDS_WEIGHTS SILENT EXCLUDED ENDED !        !    SERVING !       !             SERVING -      !       GONE
ENDED         -      -        -     STARTING GONE -       !       !             -       -      !       !
DRAINING      GONE   GONE     !     !        !    -       -       -             -       -      JOINING !
GONE          -      -        !     !        !    -       -       -             -       -      JOINING !
"""


def table():
    """(state, event) -> cell of the table: a state, "-" or "!"."""
    header, *rows = (line.split() for line in EXPECTED.strip().splitlines())
    assert {row[0] for row in rows} == State.__members__.keys() and set(header) == {event.value for event in Event}
    return {(State[row[0]], Event(event)): cell for row in rows for event, cell in zip(header, row[1:], strict=True)}


def after(state, event):
    """The next state by the table, and whether the event is allowed."""
    cell = table()[state, event]
    return (State[cell] if cell in State.__members__ else state), cell != "!"


def fleet_in(state, **options):
    fleet = Fleet(["a", "b"], **options)
    PATHS[state](fleet)
    assert fleet.state("a") is state and fleet.state("b") is State.SERVING
    return fleet


@for_each("event", Event)
@for_each("state", State)
def test_a_server_moves_as_the_table_shows(state, event):
    fleet, (expected, allowed) = fleet_in(state), after(state, event)
    if allowed:
        fleet._report("a", event)
    else:
        with pytest.raises(
            AssertionError, match=f"vLLM server a: event {event.name} is not allowed in state {state.name}"
        ):
            fleet._report("a", event)
    assert fleet.state("a") is expected and fleet.state("b") is State.SERVING


def test_the_transitions_are_those_of_the_table():
    assert {key: getattr(cell, "name", cell) for key, cell in TRANSITIONS.items()} == table()


@pytest.mark.parametrize("event", VERBS, ids=lambda event: event.value)
def test_each_verb_reports_its_event(event):
    state, verb = VERBS[event]
    fleet = fleet_in(state)
    verb(fleet)
    assert fleet.state("a") is after(state, event)[0] is not state


def test_an_unknown_server_and_an_empty_fleet_are_errors():
    with pytest.raises(AssertionError, match="vLLM server c: event SILENT is not allowed in state unknown"):
        Fleet(["a"]).silent("c")
    with pytest.raises(ValueError, match=r"rollout\.urls: no vLLM server is named"):
        Fleet([])


def test_a_server_that_was_filled_with_an_older_version_is_filled_again():
    """A push can end between the end of a refill and the report of that refill."""
    fleet = fleet_in(State.STARTING)
    fleet.synced(1)
    assert not fleet.filled("a", 0) and fleet.state("a") is State.STARTING
    assert fleet.filled("a", 1) and fleet.state("a") is State.SERVING


def test_a_late_health_check_does_not_bring_a_server_with_older_weights_back():
    fleet = fleet_in(State.SILENT)
    fleet.version = 1
    fleet.ready("a", 0)
    assert fleet.state("a") is State.SILENT
    fleet.ready("a", 1)
    assert fleet.state("a") is State.SERVING


def test_a_push_resumes_only_servers_that_loaded_it_and_the_others_wait_to_be_filled():
    """A server refilled between the load and the end of a push has older weights."""
    fleet = fleet_in(State.SILENT)
    fleet.loaded("b", 1)
    assert fleet.filled("a", 0) and fleet.serving() == ["a", "b"] and fleet.holding(1) == ["b"]
    fleet.synced(1)
    assert fleet.states() == {"a": State.SILENT, "b": State.SERVING} and fleet.version == 1


def test_a_server_that_stopped_serving_during_a_push_does_not_hold_its_weights():
    for event in ("silent", "excluded", "died"):
        fleet = Fleet(["a", "b"])
        for url in ("a", "b"):
            fleet.loading(url)
            fleet.loaded(url, 1)
        getattr(fleet, event)("a")
        assert fleet.holding(1) == ["b"]
        fleet.synced(1)
        assert fleet.serving() == ["b"]


def test_a_server_that_died_after_it_loaded_a_version_does_not_hold_it_when_it_returns():
    fleet = fleet_in(State.SERVING)
    fleet.loaded("a", 1)
    fleet.died("a")
    assert fleet.may_start("a")
    fleet.needs_weights("a")
    assert fleet.updatable() == ["a", "b"] and fleet.holding(1) == []


def test_a_waiting_server_gets_updates_and_requests_only_after_them():
    fleet = fleet_in(State.NEEDS_WEIGHTS)
    assert fleet.updatable() == ["a", "b"] and fleet.serving() == ["b"]
    for url in fleet.updatable():
        fleet.loaded(url, 1)
    assert fleet.holding(1) == ["a", "b"] and fleet.serving() == ["b"]
    fleet.synced(1)
    assert fleet.serving() == ["a", "b"]


def test_no_server_starts_while_servers_sleep():
    fleet = fleet_in(State.ENDED)
    assert fleet.begin_sleep(last=True) and fleet.leaving and not fleet.begin_sleep()
    assert not fleet.may_start("a") and fleet.state("a") is State.ENDED
    fleet.end_sleep()
    assert fleet.may_start("a") and fleet.state("a") is State.STARTING


@for_each("state", State)
def test_sleep_waits_for_servers_that_may_hold_gpu_memory_if_servers_may_return(state):
    waits = state in (State.STARTING, State.SILENT, State.EXCLUDED)
    assert fleet_in(state, patience=1.0).unsettled() == ["a"] * waits and fleet_in(state).unsettled() == []


def test_without_a_server_that_can_return_there_is_no_patience():
    fleet = Fleet(["a", "b"], patience=5.0)
    for url in ("a", "b"):
        assert fleet.patience == 5.0
        fleet.died(url)
        fleet.gone(url)
    assert fleet.patience == 0.0


def test_an_exclusion_lasts_twice_as_long_each_time_and_starts_over_after_a_good_time(monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: clock[0])
    fleet = Fleet(["a"])

    def excluded_for():
        fleet.excluded("a")
        began = clock[0]
        while fleet.is_excluded("a"):
            assert fleet.returning(["a"]) == []
            fleet.excluded("a")  # other in-flight requests fail too: that is the same exclusion
            clock[0] += 1.0
        return clock[0] - began

    assert [excluded_for() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert fleet.returning(["a"]) == ["a"] and fleet.state("a") is State.EXCLUDED
    clock[0] += fleet_module.BACKOFF_RESET_SECONDS + 1
    assert excluded_for() == 1


def test_a_generation_finishes_on_servers_that_were_removed_and_ignores_servers_that_fail():
    fleet = fleet_in(State.DRAINING)
    assert fleet.urls == fleet.serving() == ["b"] and fleet.usable(["a", "b"]) == ["a", "b"]
    fleet.silent("a")
    assert fleet.state("a") is State.GONE and fleet.usable(["a", "b"]) == ["b"] and fleet.returning(["a", "b"]) == []
    fleet.follow(["b", "a"])
    assert fleet.state("a") is State.JOINING and fleet.returning(["a", "b"]) == ["a"]


def test_a_change_of_the_servers_that_is_not_allowed_changes_nothing():
    fleet = Fleet(["a", "b", "c"])
    fleet.died("b")
    with pytest.raises(AssertionError, match="event REMOVED is not allowed in state ENDED"):
        fleet.follow(["d"])
    assert fleet.states() == {"a": State.SERVING, "b": State.ENDED, "c": State.SERVING}


class Recording(Fleet):
    """A fleet that records each event with the states before and after it, the states at each release of its lock, and
    the number of releases by each thread."""

    def __init__(self, urls):
        super().__init__(urls)
        self.events, self.releases, self.released = [], [(0, list(urls))], Counter()
        self._inner, self._lock = self._lock, self

    def __enter__(self):
        self._inner.acquire()

    def __exit__(self, *exc):
        self.releases.append((len(self.events), list(self._urls)))
        self.released[threading.get_ident()] += 1
        self._inner.release()

    def _apply(self, url, event):
        before = self._states.get(url)
        time.sleep(0)  # another thread may run here; only the lock blocks it
        try:
            return super()._apply(url, event)
        finally:
            self.events.append((url, event, before, self._states.get(url)))


NAMES = ("a", "b", "c", "d")


def report_anything(fleet, rng, queries):
    """Report one random event and then run one random query. Returns (description, result, releases before, releases
    after, releases by this thread)."""
    released = fleet.released[threading.get_ident()]
    url, version = rng.choice(NAMES), rng.randrange(3)
    verbs = [fleet.silent, fleet.excluded, fleet.died, fleet.may_start, fleet.gone, fleet.needs_weights, fleet.loading]
    calls = [lambda verb=verb: verb(url) for verb in verbs]
    calls += [lambda verb=verb: verb(url, version) for verb in (fleet.ready, fleet.filled, fleet.filled, fleet.loaded)]
    calls += [lambda: fleet.synced(version), lambda: fleet.follow(rng.sample(NAMES, rng.randint(1, 4)))]
    try:
        rng.choice(calls)()
    except AssertionError as error:
        assert "is not allowed in state" in str(error)
    first = len(fleet.releases)
    what = rng.choice(["states", "serving", "updatable"])
    result = getattr(fleet, what)()
    queries.append((what, result, first, len(fleet.releases), fleet.released[threading.get_ident()] - released))


def answer(what, states, urls):
    """The expected result of a query for these states of the servers."""
    there = {"serving": [State.SERVING], "updatable": [State.SERVING, State.NEEDS_WEIGHTS]}.get(what)
    return {url: states[url] for url in urls} if there is None else [url for url in urls if states[url] in there]


def test_what_two_threads_report_gives_the_states_of_a_sequential_model():
    fleet, queries = Recording(NAMES), ([], [])

    def work(index):
        rng = random.Random(index)
        while len(fleet.events) < 10_000:
            report_anything(fleet, rng, queries[index])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    cells, model, models = table(), dict.fromkeys(NAMES, State.SERVING), [dict.fromkeys(NAMES, State.SERVING)]
    for url, event, before, state in fleet.events:
        assert before is model[url], "an event came between another's read and write"
        cell = cells[model[url], event]
        model[url] = State[cell] if cell in State.__members__ else model[url]
        assert state is model[url]
        models.append(dict(model))
    assert all(fleet.state(url) is model[url] for url in NAMES)
    for count, urls in fleet.releases:
        assert all(models[count][url] is not State.DRAINING for url in urls)
        assert all(models[count][url] in (State.DRAINING, State.GONE) for url in set(NAMES) - set(urls))
    for what, result, first, last, released in [query for each in queries for query in each]:
        assert released == 2, "an event and a query take the lock once each"
        moments = fleet.releases[max(first - 1, 0) : last]
        assert any(result == answer(what, models[count], urls) for count, urls in moments), (
            "a query saw part of a change"
        )
    assert len(fleet.events) >= 10_000 and {event for _, event, _, _ in fleet.events} == set(Event)
