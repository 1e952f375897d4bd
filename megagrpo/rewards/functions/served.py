"""Rewards from a reward server: vLLM's /classify and /pooling, or any server with the JSON format described here."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from itertools import batched
from typing import Any
from urllib.parse import urlsplit

from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.rewards.functions.http_service import JsonService, ServiceError
from megagrpo.rewards.functions.text_rewards import text_of
from megagrpo.rewards.registry.reward_values import InvalidRewards
from megagrpo.row_image import json_image

SECRET = re.compile("authorization|cookie|key|token|secret|password", re.IGNORECASE)


@dataclass(eq=False)
class ServedReward:
    """Requests rewards from `url`. Returns None, counted as an exception, when the server fails or returns null.

    A path that ends in /classify or /pooling belongs to vLLM with a one-label classification model. It gets prompt and
    completion as text, or as messages for the server's chat template; the reward is the logit, without activation. Any
    other address gets {"prompts": [...], "completions": ["...", ...], "columns": {name: [...]}} with the columns named
    in `columns`, for one group or at most `batch_size` of its completions. It must respond with {"rewards": [number or
    null, ...]}.

    An image becomes a `data:` URL.

    A value of `headers` that begins with $ names an environment variable that holds the value to send.
    """

    value_of_failure = None

    url: str
    model: str | None = None
    columns: list[str] | None = None
    batch_size: int | None = None
    timeout: float = 30.0
    retries: int = 3
    headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.batch_size is not None and self.batch_size < 1) or self.retries < 0 or self.timeout <= 0:
            raise ValueError(
                f"{self.url}: batch_size {self.batch_size} must be 1 or more, retries {self.retries} 0 or more and "
                f"timeout {self.timeout} above 0"
            )
        self._kind = urlsplit(self.url).path.rstrip("/").rpartition("/")[2]
        self._is_vllm = self._kind in ("classify", "pooling")
        if self._is_vllm and self.columns:
            raise ValueError(f"{self.url}: vLLM's {self._kind} takes no columns; remove args.columns")
        self.independent = self._is_vllm  # another server may compare the completions of a group
        self._columns = self.columns or []
        self._model = {"model": self.model} if self.model else {}
        self._service = JsonService(self.url, self.timeout, self.retries, _revealed(self.url, self.headers or {}))
        self.needs_columns = tuple((name,) for name in self._columns)

    async def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        own = ([json_image(value) for value in columns[name]] for name in self._columns)
        rows = list(zip(prompts, completions, *own, strict=True))
        ask = self._ask_vllm if self._is_vllm else self._ask
        parts = await asyncio.gather(*(ask(list(part)) for part in batched(rows, self.batch_size or len(rows))))
        return [reward for part in parts for reward in part]

    async def _ask(self, rows: list[tuple[Any, ...]]) -> list[float | None]:
        prompts, completions, *columns = (list(values) for values in zip(*rows, strict=True))
        body = {"prompts": prompts, "completions": [text_of(c) for c in completions], **self._model}
        answer = await self._service.post(body | {"columns": dict(zip(self._columns, columns, strict=True))})
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(rows):
            form = f'{{"rewards": [{len(rows)} numbers or nulls]}}'
            raise InvalidRewards(f"{self.url}: wanted {form}, got {str(answer)[:300]}")
        return rewards

    async def _ask_vllm(self, rows: list[tuple[Any, ...]]) -> list[float | None]:
        """Request rewards from vLLM. A request may have many texts but only one chat; vLLM batches requests itself."""
        common = {**self._model, "use_activation": False, "add_special_tokens": False}
        if self._kind == "pooling":
            common["task"] = "classify"
        if isinstance(rows[0][0], str):
            texts = [prompt + text_of(completion) for prompt, completion in rows]
            answers = [await self._service.post({**common, "input": texts})]
        else:
            bodies = [{**common, "messages": [*prompt, *completion]} for prompt, completion in rows]
            answers = await asyncio.gather(*(self._service.post(body) for body in bodies))
        results = [item for answer in answers for item in sorted(answer["data"], key=lambda item: item["index"])]
        return [self._logit(item["probs"] if "probs" in item else item["data"]) for item in results]

    def _logit(self, values: Any) -> float:
        while isinstance(values, list) and len(values) == 1:
            values = values[0]
        if isinstance(values, list):
            raise ServiceError(f"{self.url}: the model has {len(values)} labels; a reward model has one")
        return float(values)


def _revealed(url: str, headers: dict[str, str]) -> dict[str, str]:
    """Return the headers with environment variables replaced. Raises ValueError for a variable that is not set, and for
    a literal secret, which the config and resolved.yaml would expose."""
    revealed = {}
    for name, value in headers.items():
        if not value.startswith("$"):
            if SECRET.search(name):
                raise ValueError(
                    f"{url}: args.headers.{name} must not be a literal secret; write $NAME to read it from an "
                    "environment variable"
                )
            revealed[name] = value
        elif (revealed.setdefault(name, ENVIRONMENT.get(value[1:], ""))) == "":
            raise ValueError(
                f"{url}: args.headers.{name} is {value}, but the environment variable {value[1:]} is not set; export it"
            )
    return revealed
