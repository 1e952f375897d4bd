"""A trainer without servers, and the prompts and rollouts that it is given."""

from types import SimpleNamespace

from dumped_steps import rollouts

from megagrpo.trainer.trainer import Trainer


class Given:
    """Prompts and a collector that always return the same rollouts, without end."""

    stop = pool = engine = None
    cursor = 0
    curriculum = SimpleNamespace(history=[])

    def next(self, count: int) -> list:
        return []

    def learn(self, rates: dict) -> dict:
        return {}

    def collect(self, *args) -> tuple[list, dict]:
        return rollouts(), {}

    def finished_ahead(self) -> list:
        return []


class Alone(Trainer):
    """A trainer without an engine."""

    def sync(self) -> None:
        self.state.weight_version += 1
