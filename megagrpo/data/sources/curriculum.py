"""Chooses the prompts that rest: prompts that the policy recently passed almost always, or almost never."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megagrpo.config import DataSection


class Curriculum:
    """Keeps the pass rates of a data set's prompts, and derives the prompts that rest.

    A prompt whose last pass rate is outside the interval `data.curriculum` rests for `curriculum_rest` epochs
    and is then drawn again. So prompts inside are drawn more often. A prompt without a pass rate does not rest. Nothing
    is random: the same history rests the same prompts. With an empty `data.curriculum` no prompt rests.
    """

    def __init__(self, section: DataSection):
        self._section = section
        self._history: dict[int, tuple[float, int]] = {}  # prompt_id -> (last pass rate, epoch of that draw)

    @property
    def history(self) -> list[tuple[int, float, int]]:
        """The whole state: (prompt_id, last pass rate, epoch of that draw) for each prompt with a pass rate."""
        return [(prompt_id, rate, epoch) for prompt_id, (rate, epoch) in self._history.items()]

    @history.setter
    def history(self, value: Iterable[Sequence[float]]) -> None:
        self._history = {int(prompt_id): (rate, int(epoch)) for prompt_id, rate, epoch in value}

    def rests(self, prompt_id: int, epoch: int) -> bool:
        """Whether the prompt rests in this epoch."""
        if not self._section.curriculum or prompt_id not in self._history:
            return False
        rate, drawn = self._history[prompt_id]
        low, high = self._section.curriculum
        return not low <= rate <= high and epoch - drawn <= self._section.curriculum_rest

    def learn(self, pass_rates: Mapping[int, float], epochs: Mapping[int, int]) -> None:
        """Store the pass rates of drawn prompts and the epochs in which they were drawn, both by prompt_id."""
        if self._section.curriculum:
            self._history |= {prompt_id: (rate, epochs[prompt_id]) for prompt_id, rate in pass_rates.items()}

    def metrics(self, epoch: int) -> dict[str, float]:
        """Return how many prompts rest in this epoch and the mean of the last pass rates; empty without pass rates."""
        if not self._history:
            return {}
        resting = sum(self.rests(prompt_id, epoch) for prompt_id in self._history)
        mean = sum(rate for rate, _ in self._history.values()) / len(self._history)
        return {"curriculum/resting": float(resting), "curriculum/pass_rate": mean}
