"""A language model as judge, through any OpenAI-compatible server: vLLM or a provider."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.rewards.functions.http_service import JsonService, ServiceError
from megagrpo.rewards.functions.text_rewards import text_of
from megagrpo.row_image import content_text, json_image

JUDGE_TEMPLATE = """Judge how well the answer below serves the question. Look for errors first, then decide.
End with one line of the form "Score: N", where N is a number from {low} (useless) to {high} (perfect).

[question]
{prompt}
[end of question]

[answer]
{completion}
[end of answer]"""
PATTERN = r"(?i)score\W{0,3}\s*(-?[0-9]+(?:\.[0-9]+)?)"
_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(eq=False)
class LlmJudge:
    """Returns the judge's score, scaled from `low`..`high` to 0..1. Returns None, counted as an exception, when the
    judge fails or gives no score.

    `url` is the server's base, such as http://host:8000/v1. `template` is the judge's task, text or a file, with
    {prompt}, {completion}, {low}, {high} and any column in braces; {image} and {images} send the images of the
    prompt to the judge at this place. `pattern` finds the score: the first group of its
    last match. `cache` is an SQLite file with all answers, so that no question is asked twice, even by another run. A
    provider's key is read from the environment variable `api_key_env`. `options` are more fields of the request.
    """

    completions_per_call = 1  # so that rewards.concurrency counts requests
    value_of_failure = None

    url: str
    model: str
    template: str = JUDGE_TEMPLATE
    system: str | None = None
    pattern: str = PATTERN
    low: float = 0.0
    high: float = 10.0
    temperature: float = 0.0
    max_tokens: int = 1024
    timeout: float = 60.0
    retries: int = 3
    cache: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"llm_judge: low {self.low:g} is not below high {self.high:g}")
        if self.timeout <= 0 or self.retries < 0:
            raise ValueError(f"llm_judge: timeout {self.timeout} must be above 0 and retries {self.retries} 0 or more")
        self._pattern = re.compile(self.pattern)
        if self._pattern.groups < 1:
            raise ValueError(f"llm_judge: pattern {self.pattern!r} needs a group, (...), around the score")
        is_file = "\n" not in self.template and Path(self.template).is_file()
        self._template = Path(self.template).read_text() if is_file else self.template
        fields = set(_FIELD.findall(self._template))
        if "completion" not in fields:
            raise ValueError("llm_judge: template lacks {completion}")
        self.needs_columns = tuple((name,) for name in sorted(fields - {"prompt", "completion", "low", "high"}))
        key = ENVIRONMENT.get(self.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._service = JsonService(self.url.rstrip("/") + "/chat/completions", self.timeout, self.retries, headers)
        self._cache = None if self.cache is None else _Cache(self.cache)

    async def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        return [await self._score(i, prompts, completions, columns) for i in range(len(completions))]

    async def _score(self, i: int, prompts: list[Any], completions: list[Any], columns: dict[str, Any]) -> float:
        values = {name: columns[name][i] for (name,) in self.needs_columns}
        values |= {
            "prompt": _as_text(prompts[i]),
            "completion": text_of(completions[i]),
            "low": f"{self.low:g}",
            "high": f"{self.high:g}",
        }
        messages = [{"role": "user", "content": _filled(self._template, values)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        request = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        return self._read(await self._ask({**request, **(self.options or {}), "messages": messages}))

    async def _ask(self, body: dict[str, Any]) -> str:
        key = hashlib.sha256(json.dumps([self._service.url, body], sort_keys=True).encode()).hexdigest()
        known = self._cache.get(key) if self._cache else None
        if known is not None:
            return known
        answer = await self._service.post(body)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ServiceError(f"{self._service.url}: no choices in its response: {str(answer)[:300]}") from None
        self._read(text)  # an answer without a score is not cached
        if self._cache:
            self._cache.put(key, text)
        return text

    def _read(self, text: str) -> float:
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise ServiceError(f"{self._service.url}: no score in the judge's response: {text[-300:]!r}")
        score = float(matches[-1][1])
        if not self.low <= score <= self.high:
            raise ServiceError(
                f"{self._service.url}: the judge's score {score:g} is not from {self.low:g} to {self.high:g}"
            )
        return (score - self.low) / (self.high - self.low)


class _Cache:
    """A file that maps the hash of a question to its answer; several processes share it."""

    def __init__(self, path: str):
        file = Path(os.path.expanduser(path))
        file.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(file, timeout=30, isolation_level=None)
        self._connection.execute("CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        row = self._connection.execute("SELECT answer FROM answers WHERE question = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def put(self, key: str, answer: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))


def _filled(template: str, values: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Return the task with its fields filled in: text, or parts of text and of images. Braces inside values stay."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": ""}]
    for number, piece in enumerate(_FIELD.split(template)):  # every second piece is the name of a field
        value = json_image(values[piece]) if number % 2 else piece
        urls = [url for url in (value if isinstance(value, list) else [value]) if str(url).startswith("data:image/")]
        if number % 2 and urls:
            parts += [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": ""}]
        elif not number % 2 or value:
            parts[-1]["text"] += str(value)
    return parts[0]["text"] if len(parts) == 1 else [part for part in parts if part.get("text") != ""]


def _as_text(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)
