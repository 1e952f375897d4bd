"""The lengths of prompts and responses that a step processes."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.config import RunConfig


@dataclass(frozen=True)
class Lengths:
    """Average tokens of prompts and responses, and the greatest response length."""

    prompt: float
    response: float
    longest: float

    @property
    def sample(self) -> float:
        return self.prompt + self.response


def expected_lengths(config: RunConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Return the given average lengths; where one is missing, half of the config's limit."""
    longest = config.max_response_length
    return Lengths(prompt or config.rollout.max_prompt_length / 2, min(response or longest / 2, longest), longest)
