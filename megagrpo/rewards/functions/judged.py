"""Rewards from verdicts of a judge: the criteria of a rubric that a response meets, and comparisons within a group."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.rewards.functions.judge_client import JudgeClient, Schema, Verdict, bounded, object_of, quoted
from megagrpo.rewards.functions.text_rewards import text_of
from megagrpo.rewards.math.answers import after_thought
from megagrpo.row_image import content_text, json_image

OWN_JUDGES = ("policy", "reference")
MOST_CRITERIA = 64
WORTH = {"first": 1.0, "tie": 0.5, "second": 0.0}  # of the first answer
GRADE = """You grade an answer to a prompt by criteria. Decide for each criterion on its own whether the answer meets \
it. A criterion that describes a fault is met if the answer has the fault."""
COMPARE = """You compare two answers to the same prompt. Decide which one serves the prompt better: `first`, `second`, \
or `tie` if neither does. Their order and their length count for nothing."""
# (task, quoted material, schema) -> the verdict
Ask = Callable[[str, dict[str, str], Schema], Awaitable[Verdict]]


@dataclass(eq=False)
class Judged(ABC):
    """What the rewards by verdicts share. docs/judges.md describes the options."""

    value_of_failure = None

    url: str | None = None
    model: str | None = None
    judge: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    instructions: str | None = None
    explain: bool = True
    shows_thought: bool = False
    image_column: str | None = None
    max_chars: int = 100_000
    max_tokens: int = 1024
    temperature: float | None = 0.0
    timeout: float = 60.0
    retries: int = 3
    verdict_retries: int = 2
    concurrency: int = 16
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.url is None) == (self.judge is None) or self.judge not in (None, *OWN_JUDGES):
            raise ValueError("name one judge: args.url with args.model, or args.judge, policy or reference")
        if self.image_column and self.url is None:
            raise ValueError(f"args.image_column: the run's own {self.judge} judges text; name a judge by args.url")
        self.needs_columns: tuple[tuple[str, ...], ...] = ((self.image_column,),) if self.image_column else ()
        if self.url is not None and not (self.url.startswith(("http://", "https://")) and self.model):
            raise ValueError(f"args.url {self.url} must be http://HOST:PORT/v1, and args.model the judge's name there")
        least = {"max_chars": 100, "max_tokens": 1, "timeout": 1e-3, "retries": 0, "verdict_retries": 0}
        for name, low in (least | {"concurrency": 1}).items():
            if getattr(self, name) < low:
                raise ValueError(f"args.{name} {getattr(self, name)} must be at least {low:g}")
        key = ENVIRONMENT.get(self.api_key_env, "")
        if not key and self.api_key_env != Judged.api_key_env:
            raise ValueError(f"args.api_key_env: the environment variable {self.api_key_env} is not set; export it")
        self._address = None if self.url is None else {"url": self.url.rstrip("/"), "key": key}
        body = {"model": self.model or self.judge, "max_tokens": self.max_tokens, "temperature": self.temperature}
        self._client = JudgeClient(
            body | (self.options or {}), self.timeout, self.retries, self.verdict_retries, self.concurrency
        )
        flag = {"criteria_met": {"type": "boolean"}}, {"better": {"type": "string", "enum": [*WORTH]}}
        reason = {"explanation": {"type": "string"}} if self.explain else {}
        self._met, self._better = (object_of(**reason, **properties) for properties in flag)

    async def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        own_judges: dict[str, dict[str, str]] | None = None,
        trainer_state: Any = None,
        prefixes: list[str] | None = None,
        log_metric: Callable[[str, float], None] = lambda *_: None,
        log_extra: Callable[[str, Any], None] = lambda *_: None,
        **columns: Any,
    ) -> list[float | None]:
        address = self._address or (own_judges or {}).get(self.judge or "")
        if address is None:
            raise RuntimeError(f"args.judge {self.judge} needs the servers of a run; here are none")
        counts, images = Counter[str](), _image_parts(columns[self.image_column][0]) if self.image_column else []
        weights = trainer_state.global_step if self.judge == "policy" and trainer_state else 0

        def ask(task: str, material: dict[str, str], schema: Schema) -> Awaitable[Verdict]:
            form = f"Respond with one JSON object of this schema and nothing else: {json.dumps(schema)}"
            shown = quoted({name: bounded(text, self.max_chars) for name, text in material.items()})
            text = "\n\n".join((self.instructions or task, form, shown))
            content = [{"type": "text", "text": text}, *images] if images else text
            return self._client.verdict(**address, content=content, schema=schema, counts=counts, weights=weights)

        opened = prefixes or [""] * len(completions)
        texts = [self._shown(completion, prefix) for completion, prefix in zip(completions, opened, strict=True)]
        rewards = await self.rewards(ask, [_conversation(p) for p in prompts], texts, columns, log_metric, log_extra)
        for name in ("judge_prompt_tokens", "judge_completion_tokens", "judge_misfits"):
            log_metric(name, counts[name] / len(completions))
        return rewards

    @abstractmethod
    async def rewards(
        self, ask: Ask, prompts: list[str], texts: list[str], columns: dict[str, Any], log_metric: Any, log_extra: Any
    ) -> list[float | None]:
        """Return the rewards of responses, as the judge sees them."""

    def _shown(self, completion: Any, prefix: str) -> str:
        """Return what the judge sees of a completion: nothing if its thought never ends."""
        if not isinstance(completion, str) and len(completion) > 1:
            return _conversation(completion)
        text = text_of(completion)
        return text if self.shows_thought else (after_thought(text, prefix) or "").strip()


def _conversation(messages: str | Sequence[dict[str, Any]]) -> str:
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{message['role']}: {content_text(message.get('content') or '')}" for message in messages)


def _image_parts(value: Any) -> list[dict[str, Any]]:
    """Return the images of a prompt, one or a list, as parts of a message."""
    urls = json_image(value if isinstance(value, list) else [value])
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls if url is not None]


class Criterion(NamedTuple):
    """One criterion of a rubric. A negative weight makes it a pitfall."""

    name: str
    text: str
    weight: float


@dataclass(eq=False)
class Rubric(Judged):
    """Returns sum(weight x met) / sum(positive weights) over the criteria, within 0..1 with `clip`.

    Criteria come from `criteria`, from the JSON file `file`, or from each row's `column`.
    """

    completions_per_call = 1

    criteria: list[Any] | None = None
    file: str | None = None
    column: str = "rubric"
    per_criterion: bool = False
    clip: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        common: Any = self.criteria if self.file is None else Path(self.file).expanduser().read_text()
        self._common = None if common is None else rubric_of(common)
        self.needs_columns += ((self.column,),) if common is None else ()

    def row_fault(self, **columns: Any) -> str | None:
        """Return what is wrong with a row's own rubric."""
        try:
            self._rubric(columns.get(self.column))
        except ValueError as error:
            return f"column `{self.column}`: {error}"
        return None

    def _rubric(self, value: Any) -> list[Criterion] | None:
        return rubric_of(value) if self._common is None and value is not None else self._common

    async def rewards(
        self, ask: Ask, prompts: list[str], texts: list[str], columns: dict[str, Any], log_metric: Any, log_extra: Any
    ) -> list[float | None]:
        """Return the rewards of responses; None without a rubric."""
        rewards, logged = list[float | None](), list[str | None]()
        for prompt, text, value in zip(prompts, texts, columns.get(self.column, [None] * len(texts)), strict=True):
            if (rubric := self._rubric(value)) is None:
                rewards.append(None)
                logged.append(None)
                continue
            verdicts = await self._verdicts(ask, {"prompt": prompt, "answer": text}, rubric)
            met = [
                criterion.weight * verdict["criteria_met"] for criterion, verdict in zip(rubric, verdicts, strict=True)
            ]
            score = math.fsum(met) / _scale(rubric)
            rewards.append(min(1.0, max(0.0, score)) if self.clip else score)
            named = [{"criterion": c.name} | verdict for c, verdict in zip(rubric, verdicts, strict=True)]
            logged.append(json.dumps(named))
            for verdict in named if self._common else ():
                log_metric(f"criteria/{verdict['criterion']}", float(verdict["criteria_met"]))
        log_extra("verdicts", logged)
        return rewards

    async def _verdicts(self, ask: Ask, material: dict[str, str], rubric: list[Criterion]) -> list[Verdict]:
        """Return the verdict on each criterion, from one request or from one per criterion."""
        if self.per_criterion:
            asked = (ask(GRADE, material | {"criterion": c.text}, self._met) for c in rubric)
            return await asyncio.gather(*asked)
        names = [f"criterion_{i}" for i in range(1, len(rubric) + 1)]
        listed = "\n".join(f"{name}: {criterion.text}" for name, criterion in zip(names, rubric, strict=True))
        verdict = await ask(GRADE, material | {"criteria": listed}, object_of(**dict.fromkeys(names, self._met)))
        return [verdict[name] for name in names]


def _scale(rubric: Sequence[Criterion]) -> float:
    return math.fsum(criterion.weight for criterion in rubric if criterion.weight > 0)


def rubric_of(value: Any) -> list[Criterion]:
    """Return the criteria of a rubric: a list, or JSON text. An entry has its text in `criterion`, `description` or
    `title`, and its `weight` or `points` (1). Raises ValueError."""
    try:
        entries = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"the rubric is not JSON: {error}") from None
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_CRITERIA:
        raise ValueError(f"the rubric must be a list of 1 to {MOST_CRITERIA} criteria")
    rubric = [_criterion(entry, number) for number, entry in enumerate(entries, 1)]
    names = Counter(criterion.name for criterion in rubric)
    rubric = [c._replace(name=f"{i}. {c.name}") if names[c.name] > 1 else c for i, c in enumerate(rubric, 1)]
    if not _scale(rubric) > 0:
        raise ValueError("no criterion of the rubric has a positive weight; pitfalls alone give no scale")
    return rubric


def _criterion(entry: Any, number: int) -> Criterion:
    entry = {"criterion": entry} if isinstance(entry, str) else entry
    texts = (
        [str(entry.get(name) or "") for name in ("criterion", "description", "title")]
        if isinstance(entry, dict)
        else []
    )
    text = next((text for text in texts if text.strip()), None)
    if text is None:
        raise ValueError(f"criterion {number} of the rubric has no text in `criterion`, `description` or `title`")
    weight = entry.get("weight", entry.get("points", 1.0))
    if type(weight) not in (int, float) or not abs(weight) <= 1e6:  # NaN too
        raise ValueError(f"criterion {number} of the rubric has weight {str(weight)[:50]!r}; give a number up to 1e6")
    name = "".join(c if c.isprintable() else " " for c in (texts[2].strip() or text)).strip()
    return Criterion(name if len(name) <= 60 else f"{name[:57]}...", text, float(weight))


@dataclass(eq=False)
class Pairwise(Judged):
    """Returns the share of comparisons with other responses of the group that a response wins; a tie is half a win.

    Each pair is compared in both orders. A response meets all others, or `opponents` of them in a larger group, which
    `seed` and the prompt choose.
    """

    opponents: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents < 2 or self.opponents % 2:
            raise ValueError(f"args.opponents {self.opponents} must be an even number, 2 or more")

    async def rewards(
        self, ask: Ask, prompts: list[str], texts: list[str], columns: dict[str, Any], log_metric: Any, log_extra: Any
    ) -> list[float | None]:
        """Return the rewards of a group; None for a response without others."""
        if len(texts) < 2:
            return [None] * len(texts)

        async def worth(first: int, second: int) -> float:
            """Return what a comparison is worth for the first response."""
            if texts[first] == texts[second]:
                return 0.5
            material = {"prompt": prompts[0], "first_answer": texts[first], "second_answer": texts[second]}
            return WORTH[(await ask(COMPARE, material, self._better))["better"]]

        orders = [order for i, j in self.pairs(len(texts), prompts[0]) for order in ((i, j), (j, i))]
        # all come to an end before an error counts, so that a repeated call finds the other verdicts
        found = await asyncio.gather(*(worth(*order) for order in orders), return_exceptions=True)
        shares = [share for share in found if isinstance(share, float)]
        if errors := [error for error in found if isinstance(error, BaseException)]:
            raise errors[0]
        won: list[list[float]] = [[] for _ in texts]
        for (first, second), share in zip(orders, shares, strict=True):
            won[first].append(share)
            won[second].append(1 - share)
        log_metric("first_position", math.fsum(shares) / len(shares))
        return [math.fsum(own) / len(own) for own in won]

    def pairs(self, count: int, prompt: str) -> list[tuple[int, int]]:
        """Return the pairs of a group: all, or each response with its nearest `opponents` in a shuffled ring."""
        if count - 1 <= self.opponents:
            return list(combinations(range(count), 2))
        ring = list(range(count))
        random.Random(hashlib.sha256(json.dumps([self.seed, prompt]).encode()).digest()).shuffle(ring)
        offsets = range(1, self.opponents // 2 + 1)
        return [(ring[i], ring[(i + offset) % count]) for i in range(count) for offset in offsets]
