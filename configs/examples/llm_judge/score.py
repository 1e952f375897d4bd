"""A reward that asks a judge for a number and reads it from the judge's text. `rubric` and `pairwise` (docs/judges.md)
get verdicts of a fixed form instead, which a judge of 135M parameters cannot give."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megagrpo.rewards.functions.http_service import JsonService, ServiceError


@dataclass
class Score:
    """Returns the judge's score of each completion, scaled from `low`..`high` to 0..1. A completion whose judge fails
    or gives no score has no value, and is counted in `rewards/score/exceptions`.

    `url` is the server's base, `template` the judge's task with {completion} in it. The first group of `pattern`'s last
    match is the score. `options` are more fields of the request.
    """

    completions_per_call = 1  # so that rewards.concurrency counts requests
    value_of_failure = None

    url: str
    model: str
    template: str
    pattern: str
    low: float
    high: float
    max_tokens: int
    timeout: float = 60.0
    retries: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.service = JsonService(f"{self.url}/chat/completions", self.timeout, self.retries)

    async def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        """Return the scores of completions: texts, or conversations whose last message counts."""
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [await self.score(text) for text in texts]

    async def score(self, completion: str) -> float:
        """Ask the judge about one completion. Raises ServiceError."""
        task = self.template.replace("{completion}", completion)
        body = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens} | self.options
        answer = await self.service.post(body | {"messages": [{"role": "user", "content": task}]})
        text = answer["choices"][0]["message"]["content"] or ""
        found = re.findall(self.pattern, text)
        if not found or not self.low <= float(found[-1]) <= self.high:
            raise ServiceError(f"{self.url}: no score from {self.low:g} to {self.high:g} in {text[-300:]!r}")
        return (float(found[-1]) - self.low) / (self.high - self.low)
