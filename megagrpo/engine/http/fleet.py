"""The state of every vLLM server of a run: one state per server, one lock, one table of transitions.

The client, weight updates, the restart thread and the reconnect thread report events to a `Fleet` and query it. No
other module stores which server is in which state.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import Enum

# exclusion time of an unreliable server; it doubles in between
FIRST_EXCLUSION_SECONDS, LONGEST_EXCLUSION_SECONDS = 1.0, 60.0
BACKOFF_RESET_SECONDS = 120.0  # without an exclusion for this long, the exclusion time starts over


class State(Enum):
    """The state of one server.

    Only trainer rank 0 restarts servers or gives them weights: STARTING, NEEDS_WEIGHTS and ENDED occur only there.
    """

    JOINING = "joining"  # rollout.urls_file named it during the run; it has never served this run
    STARTING = "starting"  # its process was restarted and does not have the current weights yet
    SERVING = "serving"  # has the current weights and gets requests
    SILENT = "silent"  # failed its health check, did not respond, or missed a weight update; its process may be alive
    EXCLUDED = "excluded"  # responds, but its responses were invalid or late
    NEEDS_WEIGHTS = "needs_weights"  # healthy; gets weights in the next push of all ranks, and requests after that push
    ENDED = "ended"  # its process has ended and may be restarted
    # rollout.urls_file no longer names it; calls of `generate` that use it already may finish on it
    DRAINING = "draining"
    GONE = "gone"  # does not return: restart limit reached, or removed from rollout.urls_file and not draining


class Event(Enum):
    """What is reported about one server. The verb of `Fleet` that reports it has the same name, except where noted."""

    SILENT = "silent"
    EXCLUDED = "excluded"
    DIED = "died"
    STARTED = "started"  # `may_start`
    GONE = "gone"
    READY = "ready"
    FILLED = "filled"
    WAITING = "waiting"  # `needs_weights`
    SYNCED = "synced"  # `synced`, for a server that loaded the version
    MISSED = "missed"  # `synced`, for a server that did not
    NAMED = "named"  # `follow`
    REMOVED = "removed"  # `follow`


# The state after an event. "-": the event is ignored. "!": the event raises AssertionError, with state and event.
TRANSITION_TABLE = """
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


def _read_table() -> dict[tuple[State, Event], State | str]:
    header, *rows = (line.split() for line in TRANSITION_TABLE.strip().splitlines())
    return {
        (State[name], Event(event)): cell if cell in "-!" else State[cell]
        for name, *cells in rows
        for event, cell in zip(header, cells, strict=True)
    }


TRANSITIONS = _read_table()
HOLDING_WEIGHTS = {State.SERVING, State.NEEDS_WEIGHTS}  # states in which a server may hold a known weight version


class Fleet:
    """The servers of a run, their states and the weight version that they serve. Thread-safe: one lock covers all.

    `urls` are the run's servers; all serve at first. While none serves, the run waits up to `patience` seconds for one
    to return. With 0 a server that stops serving never returns. Raises ValueError without any URL.

    `TRANSITION_TABLE` has all transitions. Events that are ignored come from another thread, too late:
    - silent, excluded: a request to a server that does not serve has failed. A STARTING server is not blamed for its
      former process, and an EXCLUDED one keeps its exclusion time. A server that joins stays JOINING: it never served.
    - ready: the client's health check ended after the state had changed. A STARTING server gets requests from `filled`
      on.
    - filled, waiting: the client has seen earlier that the server has the current weights, or the server was removed
      meanwhile.
    - synced, missed: the server stopped serving during the update, or it did not serve before.

    ENDED is a state of its own: an ended process holds no GPU memory, so `unsettled` leaves it out, and only an ENDED
    server may be started. DRAINING exists because `urls_file` may change while other threads generate.
    """

    def __init__(self, urls: Sequence[str], patience: float = 0.0):
        if not urls:
            raise ValueError("rollout.urls: no vLLM server is named and none was started")
        self._lock = threading.Lock()
        self._urls = list(urls)
        self._states = dict.fromkeys(urls, State.SERVING)
        self._loaded: dict[str, int] = {}  # URL -> weight version that the server loaded last and has not lost since
        self.version = 0  # the current weight version; set it when another rank has synced the servers
        self._patience = patience
        self.asleep = False  # servers sleep; set by `begin_sleep` and `end_sleep`
        self.leaving = False  # servers that are unsettled are to be killed
        self._exclusions: Counter[str] = Counter()
        self._excluded_until: dict[str, float] = {}

    # -- events of one server

    def silent(self, url: str) -> None:
        """The server failed its health check or does not respond."""
        self._report(url, Event.SILENT)

    def excluded(self, url: str) -> None:
        """The server responds but is unreliable. Its exclusion time doubles with each exclusion."""
        with self._lock:
            if self._apply(url, Event.EXCLUDED):
                self._extend_exclusion(url)

    def died(self, url: str) -> None:
        """The server's process has ended."""
        self._report(url, Event.DIED)

    def may_start(self, url: str) -> bool:
        """Whether an ENDED server's process may be restarted now; then it is STARTING, and the caller restarts it.

        False while servers sleep: the trainer uses the GPUs, also the one of the server that ended. `begin_sleep` and
        this method exclude each other, so no server starts unnoticed.
        """
        with self._lock:
            return not self.asleep and self._apply(url, Event.STARTED)

    def gone(self, url: str) -> None:
        """The server's process has ended and is not restarted."""
        self._report(url, Event.GONE)

    def ready(self, url: str, version: int) -> None:
        """The server was seen healthy, serving weights of `version`. Ignored if another version is current by now."""
        with self._lock:
            if version == self.version:
                self._apply(url, Event.READY)

    def filled(self, url: str, version: int) -> bool:
        """The server loaded weights of `version` after it returned. Returns whether it serves now.

        If another version is current by now, the event is ignored: the server missed that version and must be filled.
        """
        with self._lock:
            if version == self.version:
                self._apply(url, Event.FILLED)
            return self._states[url] is State.SERVING

    def needs_weights(self, url: str) -> None:
        """The server is healthy and waits for the next push of all ranks."""
        self._report(url, Event.WAITING)

    # -- weights

    def loading(self, url: str) -> None:
        """The server starts to load weights. Until `loaded` it holds no known version."""
        with self._lock:
            self._loaded.pop(url, None)

    def loaded(self, url: str, version: int) -> None:
        """The server loaded weights of `version`."""
        with self._lock:
            self._loaded[url] = version

    def synced(self, version: int) -> None:
        """Make `version` current. Servers with it serve; servers that served and missed it are SILENT until filled."""
        with self._lock:
            self.version = version
            for url in self._urls:
                self._apply(url, Event.SYNCED if self._loaded.get(url) == version else Event.MISSED)

    # -- all servers

    def follow(self, urls: Sequence[str]) -> None:
        """Replace the run's servers by `urls`. New ones are JOINING, removed ones DRAINING if they serve, else GONE."""
        with self._lock:
            removed, added = set(self._urls) - set(urls), set(urls) - set(self._urls)
            events = [(url, Event.REMOVED) for url in removed]
            events += [(url, Event.NAMED) for url in added & self._states.keys()]
            for url, event in events:
                self._next(url, event)  # all of them are allowed, or nothing changes
            for url, event in events:
                self._apply(url, event)
            self._states |= dict.fromkeys(added - self._states.keys(), State.JOINING)
            self._urls = list(urls)

    def begin_sleep(self, last: bool = False) -> bool:
        """Record that servers sleep now; returns whether they were awake. No server may start until `end_sleep`.

        `last` means that servers in `unsettled` are to be killed instead of waited for.
        """
        with self._lock:
            if self.asleep:
                return False
            self.asleep, self.leaving = True, last
            return True

    def end_sleep(self) -> None:
        """Record that servers are awake."""
        with self._lock:
            self.asleep = False

    # -- queries; each is a consistent snapshot

    @property
    def urls(self) -> list[str]:
        """The servers of the run, in order."""
        with self._lock:
            return list(self._urls)

    @property
    def patience(self) -> float:
        """Seconds to wait for a server while none serves; 0 when no server can return, also because all are GONE."""
        with self._lock:
            return 0.0 if all(self._states[url] is State.GONE for url in self._urls) else self._patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        with self._lock:
            self._patience = seconds

    def state(self, url: str) -> State:
        """The state of one server. Raises KeyError for a URL that was never named."""
        with self._lock:
            return self._states[url]

    def states(self) -> dict[str, State]:
        """The state of each server of the run, in order."""
        with self._lock:
            return {url: self._states[url] for url in self._urls}

    def serving(self) -> list[str]:
        """Servers that get requests."""
        with self._lock:
            return self._in_states({State.SERVING})

    def updatable(self) -> list[str]:
        """Servers that get weight updates: they serve, or wait for weights."""
        with self._lock:
            return self._in_states(HOLDING_WEIGHTS)

    def holding(self, version: int) -> list[str]:
        """Servers of `updatable` that have loaded `version`."""
        with self._lock:
            return [url for url in self._in_states(HOLDING_WEIGHTS) if self._loaded.get(url) == version]

    def unsettled(self) -> list[str]:
        """Servers that may hold GPU memory and cannot be put to sleep until the restart thread has filled or killed
        them. Without patience no server returns, and none is waited for."""
        with self._lock:
            return self._in_states({State.STARTING, State.SILENT, State.EXCLUDED}) if self._patience else []

    def usable(self, urls: Iterable[str]) -> list[str]:
        """Those of `urls` that a call of `generate` which uses them may send requests to: they serve, or drain."""
        with self._lock:
            return [url for url in urls if self._states[url] in (State.SERVING, State.DRAINING)]

    def returning(self, urls: Iterable[str]) -> list[str]:
        """Those of `urls` that may be ready: not in use, for another reason than a restart, and no longer excluded."""
        out, now = (State.JOINING, State.SILENT, State.EXCLUDED, State.NEEDS_WEIGHTS), time.monotonic()
        with self._lock:
            return [url for url in urls if self._states[url] in out and now >= self._excluded_until.get(url, 0.0)]

    def is_excluded(self, url: str) -> bool:
        """Whether the server's exclusion time has not passed yet."""
        with self._lock:
            return time.monotonic() < self._excluded_until.get(url, 0.0)

    def _report(self, url: str, event: Event) -> None:
        with self._lock:
            self._apply(url, event)

    # -- call these with the lock held

    def _in_states(self, states: Collection[State]) -> list[str]:
        return [url for url in self._urls if self._states[url] in states]

    def _next(self, url: str, event: Event) -> State | None:
        """The state after `event`, or None if the event is ignored. Raises AssertionError if the table forbids it."""
        state = self._states.get(url)
        after = "!" if state is None else TRANSITIONS[state, event]
        if after == "!":
            shown = "unknown" if state is None else state.name
            raise AssertionError(f"vLLM server {url}: event {event.name} is not allowed in state {shown}")
        return after if isinstance(after, State) else None

    def _apply(self, url: str, event: Event) -> bool:
        """Move the server to its next state. Returns False when the event is ignored. Raises the error of `_next`."""
        state = self._next(url, event)
        if state is None:
            return False
        if state not in HOLDING_WEIGHTS:
            self._loaded.pop(url, None)
        self._states[url] = state
        return True

    def _extend_exclusion(self, url: str) -> None:
        now, until = time.monotonic(), self._excluded_until.get(url, 0.0)
        if now < until:
            return
        if now > until + BACKOFF_RESET_SECONDS:
            del self._exclusions[url]
        seconds = FIRST_EXCLUSION_SECONDS * 2 ** self._exclusions[url]
        self._excluded_until[url] = now + min(seconds, LONGEST_EXCLUSION_SECONDS)
        self._exclusions[url] += 1
