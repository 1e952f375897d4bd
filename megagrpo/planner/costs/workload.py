"""The lengths of prompts and responses that a step processes, and how many responses share a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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


@dataclass(frozen=True)
class Bundle:
    """An average bundle of `data/packing/sample_packing.py`: `responses` to one prompt, with one copy of the prompt."""

    prompt: float
    response: float
    responses: float

    @property
    def tokens(self) -> float:
        """Tokens of the bundle."""
        return self.prompt + self.responses * self.response

    @property
    def tokens_per_response(self) -> float:
        """Tokens that the trainer computes for one sample."""
        return self.tokens / self.responses


def responses_together(config: RunConfig, prompt: float, response: float) -> int:
    """Return the most responses in a micro-batch on a GPU that share one copy of their prompt; 1 if none is shared."""
    if not config.shares_prompts(transformer_engine=True):
        return 1
    fitting = int((config.train.max_tokens_per_micro_batch - prompt) / response)
    return max(1, min(config.rollout.num_generations, fitting))


def average_bundle(config: RunConfig, lengths: Lengths) -> Bundle:
    """Return the bundle of samples of average length. A group that exceeds a micro-batch is spread over several."""
    group = config.rollout.num_generations
    copies = ceil(group / responses_together(config, lengths.prompt, lengths.response))
    return Bundle(lengths.prompt, lengths.response, group / copies)


def expected_lengths(config: RunConfig, prompt: float | None = None, response: float | None = None) -> Lengths:
    """Return the given average lengths; where one is missing, half of the config's limit."""
    longest = config.max_response_length
    return Lengths(prompt or config.rollout.max_prompt_length / 2, min(response or longest / 2, longest), longest)
