"""Which prompts rest: those that the policy lately got almost always right, or almost never."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megagrpo.config import DataSection


class Curriculum:
    """The pass rates of a data set's prompts, and the prompts that rest because of them.

    A prompt whose last pass rate lies outside [`curriculum_low`, `curriculum_high`] is left out for `curriculum_rest` epochs and then tried
    again, so that those inside are drawn more often. A prompt without a pass rate is drawn. Nothing is random: the same history rests the
    same prompts. With `data.curriculum: off` there is none.
    """

    def __init__(self, section: DataSection):
        self._section = section
        self._history: dict[int, tuple[float, int]] = {}  # prompt_id -> (pass rate when it was last drawn, epoch of that)

    @property
    def history(self) -> list[tuple[int, float, int]]:
        """The whole state: (prompt_id, pass rate when it was last drawn, epoch of that) of each prompt that has one."""
        return [(prompt_id, rate, epoch) for prompt_id, (rate, epoch) in self._history.items()]

    @history.setter
    def history(self, value: Iterable[Sequence[float]]) -> None:
        self._history = {int(prompt_id): (rate, int(epoch)) for prompt_id, rate, epoch in value}

    def rests(self, prompt_id: int, epoch: int) -> bool:
        """Whether the prompt is left out of this epoch."""
        if prompt_id not in self._history:
            return False
        rate, drawn = self._history[prompt_id]
        inside = self._section.curriculum_low <= rate <= self._section.curriculum_high
        return not inside and epoch - drawn <= self._section.curriculum_rest

    def learn(self, pass_rates: Mapping[int, float], epochs: Mapping[int, int]) -> None:
        """Take in the pass rates of prompts, by prompt_id, and the epochs in which they were drawn."""
        if self._section.curriculum == "pass_rate":
            self._history |= {prompt_id: (rate, epochs[prompt_id]) for prompt_id, rate in pass_rates.items()}

    def metrics(self, epoch: int) -> dict[str, float]:
        """How many prompts rest in this epoch, and the mean of the last pass rates; nothing before there is any."""
        if not self._history:
            return {}
        resting = sum(self.rests(prompt_id, epoch) for prompt_id in self._history)
        mean = sum(rate for rate, _ in self._history.values()) / len(self._history)
        return {"curriculum/resting": float(resting), "curriculum/pass_rate": mean}
