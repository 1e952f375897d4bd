"""What engines of conversations and of several tasks pass on to the vLLM engine below them."""

from __future__ import annotations

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import AheadGenerator


class WrappedEngine(AheadGenerator):
    """A generator on top of a vLLM engine, whose weights it has."""

    def __init__(self, engine: VllmEngine):
        self.engine = engine

    @property
    def weight_version(self) -> int:
        """The weight version of the wrapped engine."""
        return self.engine.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.engine.weight_version = version

    def interrupt(self) -> None:
        """Make running and later calls of `groups` raise EngineInterrupted."""
        self.engine.interrupt()

    def leave_old_adapters(self) -> None:
        """Continue turns in progress with the current adapter; see `VllmEngine.leave_old_adapters`."""
        self.engine.leave_old_adapters()
