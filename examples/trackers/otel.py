"""Sends traces to an OpenTelemetry collector (OTLP over HTTP): each step with its phases, and some conversations.

    run:
      trackers: [tensorboard, examples/trackers/otel.py:OtelSink]

The variables of OpenTelemetry count, such as OTEL_EXPORTER_OTLP_ENDPOINT. Names and `gen_ai.*` attributes are those of
its semantic conventions for generative AI. Texts are left out. Needs opentelemetry-exporter-otlp-proto-http, which
comes with vLLM.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from megagrpo.platform.process.terminal import warn
from megagrpo.records.rows.completions import Row, Rows
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

CONVERSATIONS = 16  # of a step that are sent, the first ones
SHOWN = ("reward", "loss", "grad_norm", "learning_rate", "completions/mean_length", "token_mult_prob_error", "mfu")
MOST_SPANS = 4096  # of a step's conversations
LEAST_WAIT = 0.001  # seconds of a wait that is shown
Attributes = dict[str, str | int | float | list[str]]


class OtelSink(TrackerSink):
    """Rank 0's spans. A trace is a step, or what lies between two steps (an evaluation, a checkpoint), or one of the
    first conversations of a step: at most CONVERSATIONS, with at most MOST_SPANS together."""

    def __init__(self, run: TrackedRun):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        super().__init__(run)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one warning of `_Reporting` replaces its lines
        described = {"service.version": version("megagrpo"), "service.instance.id": run.id("otel")}
        given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        if "service.name" not in given and not os.environ.get("OTEL_SERVICE_NAME"):
            described |= {"service.name": "megagrpo"}
        resource = Resource.create({**described, "megagrpo.run.name": run.name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        sender = BatchSpanProcessor(_reporting(OTLPSpanExporter()), max_queue_size=2 * MOST_SPANS)
        self._provider.add_span_processor(sender)
        self._tracer = self._provider.get_tracer("megagrpo")
        self._config, self._conversations = run.config, list[Interval]()
        self._epoch = time.time() - time.perf_counter()
        self._open: list[Interval] = []  # ended phases whose outer phase has not ended

    def phase(self, name: str, start: float, stop: float) -> None:
        """Take a phase that has ended. Phases inside it have ended before it."""
        start, stop = self._epoch + start, self._epoch + stop
        first = next((i for i, other in enumerate(self._open) if other.start >= start), len(self._open))
        whole = Interval(name, start, stop, self._open[first:])
        self._open[first:] = [whole]
        if name == "between_steps":
            self._emit([one for one in self._open if one.inside])
            self._open = []

    def table(self, step: int, rows: Rows) -> None:
        """Take the first conversations of a step, whose spans follow those of the step."""
        section, left = self._config.multi_turn, MOST_SPANS
        played = section.agent or section.environment or section.scheduler or self._config.run.name
        about: Attributes = {
            "gen_ai.agent.name": played.rpartition(":")[2],
            "gen_ai.request.model": self._config.model.path,
            "megagrpo.step": step,
        }
        for number, row in enumerate(islice(rows, CONVERSATIONS)):
            named = {"gen_ai.conversation.id": f"{step}-{number}", "megagrpo.prompt_id": row["prompt_id"]}
            if (whole := conversation_interval(row, about | named, left)) is not None:
                self._conversations.append(whole)
                left -= 1 + len(whole.inside)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        generated = metrics.get("num_generated_tokens", 0.0)
        attributes: Attributes = {
            "megagrpo.step": step,
            "gen_ai.request.model": self._config.model.path,
            "gen_ai.usage.output_tokens": int(generated),
            "gen_ai.usage.input_tokens": int(metrics.get("num_tokens", 0.0) - generated),
        }
        attributes |= {f"megagrpo.{name.replace('/', '.')}": metrics[name] for name in SHOWN if name in metrics}
        for phase in self._open:
            phase.attributes = attributes
        steps, self._open = self._emit(self._open), []
        self._emit(self._conversations, links_to=steps[-1:])
        self._conversations = []

    def close(self, failed: bool = False) -> None:
        for phase in self._open:
            phase.failed = "the run ended with an error" if failed else ""
        self._emit(self._open)
        self._provider.shutdown()  # sends what is left

    def _emit(self, roots: Sequence[Interval], links_to: Sequence[Span] = ()) -> list[Span]:
        """Start and end the spans of these intervals, each the root of a trace, and return the roots."""
        from opentelemetry.trace import Link, SpanKind, Status, StatusCode, set_span_in_context

        def emit(one: Interval, parent: Span | None) -> Span:
            span = self._tracer.start_span(
                one.name,
                None if parent is None else set_span_in_context(parent),
                SpanKind.CLIENT if one.asks else SpanKind.INTERNAL,
                attributes=one.attributes,
                links=[Link(span.get_span_context()) for span in links_to] if parent is None else (),
                start_time=int(one.start * 1e9),
            )
            if one.failed:
                span.set_status(Status(StatusCode.ERROR, one.failed))
            for inner in one.inside:
                emit(inner, span)
            span.end(int(one.stop * 1e9))
            return span

        return [emit(root, None) for root in roots]


def _reporting(exporter: SpanExporter) -> SpanExporter:
    """Return an exporter that warns once when spans do not arrive."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Reporting(SpanExporter):
        def __init__(self) -> None:
            self.warned = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            address = getattr(exporter, "_endpoint", "the collector")
            try:
                result, why = exporter.export(spans), "the collector did not accept them"
            except Exception as error:
                result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
            if result is not SpanExportResult.SUCCESS and not self.warned:
                self.warned = True
                warn(
                    f"warning: otel: {len(spans)} spans were not sent to {address}: {why}; training continues. Check "
                    "the variables OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS"
                )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Reporting()


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
