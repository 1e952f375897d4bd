"""A recorded conversation as spans: its turns, what they waited for, and what answered them.

Names and `gen_ai.*` attributes are those of OpenTelemetry's semantic conventions for generative AI. Texts are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from megagrpo.records.rows.completions import Row

LEAST_WAIT = 0.001  # seconds of a wait that is shown
Attributes = dict[str, str | int | float | list[str]]


@dataclass
class Interval:
    """A span, with the spans inside it. Times are in seconds since 1970. `asks` is whether it is a request."""

    name: str
    start: float
    stop: float
    inside: list[Interval] = field(default_factory=list)
    attributes: Attributes = field(default_factory=dict)
    asks: bool = False
    failed: str = ""


def conversation_interval(row: Row, about: Attributes, most: int) -> Interval | None:
    """Return the conversation of a row of `completions.jsonl`, with at most `most` spans; None without recorded times.

    `about` are attributes of the conversation; the model and the agent among them name its spans.
    """
    samples = [row, *row.get("branches", ())]
    turns = [span for number, sample in enumerate(samples) for span in _turn_spans(sample, number, about)]
    if not turns or most < 2:
        return None
    dialogue = row["dialogue"]
    attributes: Attributes = {
        "gen_ai.operation.name": "invoke_agent",
        **about,
        "gen_ai.usage.output_tokens": row["num_tokens"],
        "megagrpo.samples": len(samples),
        "megagrpo.turns": sum(span.asks for span in turns),
        "megagrpo.ended": dialogue["ended"],
        **({"megagrpo.retries": dialogue["retries"]} if dialogue["retries"] else {}),
        **({"megagrpo.reward": row["reward"]} if row.get("reward") is not None else {}),
    }
    turns.sort(key=lambda span: span.start)
    start, stop = turns[0].start, max(span.stop for span in turns)
    failed = (dialogue["cause"] or "failed") if dialogue["ended"] == "failed" else ""
    name = f"invoke_agent {about['gen_ai.agent.name']}"
    return Interval(name, start, stop, list(islice(turns, most - 1)), attributes, failed=failed)


def _turn_spans(sample: Row, number: int, about: Attributes) -> Iterator[Interval]:
    """Yield the spans of a sample's turns: the wait for a slot, the generation, the answer to it."""
    model = str(about["gen_ai.request.model"])
    for turn in (sample.get("dialogue") or {}).get("turns", ()):
        if not (began := turn.get("began")):
            continue
        common: Attributes = {"megagrpo.sample": number}
        waits = turn["queued"] >= LEAST_WAIT
        granted, done = began + (turn["queued"] if waits else 0.0), began + turn["generated"]
        if waits:
            yield Interval("wait_for_slot", began, granted, attributes=common)
        asked = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": model}
        used = {
            "gen_ai.usage.input_tokens": sample.get("prompt_tokens", 0) + turn["start"],
            "gen_ai.usage.output_tokens": turn["stop"] - turn["start"],
            "gen_ai.response.finish_reasons": [turn["finish_reason"]],
        }
        yield Interval(f"chat {model}", granted, done, attributes=common | asked | used, asks=True)
        if turn["answered"]:
            yield _answer(turn, done, common)


def _answer(turn: dict[str, Any], start: float, common: Attributes) -> Interval:
    """Return the time until a turn was answered: by its tool calls together, else by a scheduler, an environment or
    the agent's own work."""
    stop = start + turn["answered"]
    if not turn["calls"]:
        return Interval("answer", start, stop, attributes=common)
    names = ", ".join(dict.fromkeys(turn["calls"]))
    called: Attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": names,
        "megagrpo.tool.calls": len(turn["calls"]),
        "megagrpo.tool.failures": turn["failures"],
    }
    failed = f"{turn['failures']} calls failed" if turn["failures"] else ""
    return Interval(f"execute_tool {names}", start, stop, attributes=common | called, failed=failed)
