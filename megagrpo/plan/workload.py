"""What a step has to do, as far as it decides the seconds: how long prompts and responses are."""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.config import RunConfig


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses, on average, and the longest response there may be."""

    prompt: float
    response: float
    longest: float

    @property
    def sample(self) -> float:
        return self.prompt + self.response


def expected_lengths(config: RunConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Half of what the config allows where nothing is known."""
    longest = config.max_response_length
    return Lengths(prompt or config.rollout.max_prompt_length / 2, min(response or longest / 2, longest), longest)
