"""The interface of servers that a run started, on this host or on another one, for the restart thread and hang
detection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol


class LaunchedServer(Protocol):
    """One server that the run started. `Server` runs on this host, `DistantServer` on another node."""

    @property
    def url(self) -> str:
        """The name that clients know."""

    @property
    def address(self) -> str:
        """The URL that the server listens on."""

    @property
    def log(self) -> Path:
        """Its log file."""

    @property
    def process(self) -> Hashable:
        """Identity of its process: a restarted server has another one."""

    @property
    def alive(self) -> bool:
        """Whether its process is running."""

    @property
    def exit_description(self) -> str:
        """How it ended, as text for a message."""

    def end(self) -> None:
        """Stop it and all its processes."""


class Launched(Protocol):
    """The servers that a run started: a `Launcher`, or the launchers of several nodes."""

    @property
    def servers(self) -> Sequence[LaunchedServer]:
        """All servers, in order."""

    @property
    def restarts(self) -> Counter[str]:
        """URL -> number of restarts."""

    @property
    def token(self) -> str | None:
        """The token that the servers require."""

    @property
    def startup_timeout(self) -> float:
        """Seconds within which a server must respond."""

    def may_restart(self, server: LaunchedServer) -> bool:
        """Whether the server has been restarted fewer times than the limit."""

    def restart(self, index: int) -> str:
        """Restart a server that has ended, without waiting for it, and return the line to log."""
