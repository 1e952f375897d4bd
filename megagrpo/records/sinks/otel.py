"""Sends one trace per step to an OpenTelemetry collector (OTLP over HTTP): the step, and its phases as child spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from megagrpo.platform.process.terminal import warn
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.records.sinks.sink import TrackedRun, TrackerSink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ROUTE = "/v1/traces"
SHOWN = ("reward", "loss", "grad_norm", "learning_rate", "completions/mean_length", "token_mult_prob_error", "mfu")


@dataclass
class Interval:
    """A phase, with the phases inside it. Times are those of `time.perf_counter`."""

    name: str
    start: float
    stop: float
    inside: list[Interval] = field(default_factory=list)


class OtelSink(TrackerSink):
    """Rank 0's spans. A trace is a step, or what lies between two steps: an evaluation, a checkpoint."""

    def __init__(self, run: TrackedRun):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        super().__init__(run)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # one warning of `_Reporting` replaces its lines
        endpoint = run.config.run.otel.endpoint
        if endpoint is not None:
            endpoint = endpoint.rstrip("/").removesuffix(ROUTE) + ROUTE
        described = {"service.version": version("megagrpo"), "service.instance.id": run.id("otel")}
        if "service.name" not in ENVIRONMENT.get("OTEL_RESOURCE_ATTRIBUTES", "") and not ENVIRONMENT.get(
            "OTEL_SERVICE_NAME"
        ):
            described |= {"service.name": "megagrpo"}
        resource = Resource.create({**described, "megagrpo.run.name": run.name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_reporting(OTLPSpanExporter(endpoint=endpoint))))
        self._tracer = self._provider.get_tracer("megagrpo")
        self._model = run.config.model.path
        self._epoch = time.time() - time.perf_counter()
        self._open: list[Interval] = []  # ended phases whose outer phase has not ended

    def phase(self, name: str, start: float, stop: float) -> None:
        """Take a phase that has ended. Phases inside it have ended before it."""
        first = next((i for i, other in enumerate(self._open) if other.start >= start), len(self._open))
        whole = Interval(name, start, stop, self._open[first:])
        self._open[first:] = [whole]
        if name == "between_steps":
            self._emit({}, [one for one in self._open if one.inside])

    def step(self, step: int, metrics: dict[str, float]) -> None:
        generated = metrics.get("num_generated_tokens", 0.0)
        attributes: dict[str, str | float] = {
            "megagrpo.step": step,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.output_tokens": int(generated),
            "gen_ai.usage.input_tokens": int(metrics.get("num_tokens", 0.0) - generated),
        }
        attributes |= {f"megagrpo.{name.replace('/', '.')}": metrics[name] for name in SHOWN if name in metrics}
        self._emit(attributes, self._open)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Do nothing: the phases of an evaluation are in the trace between its steps."""

    def close(self, failed: bool = False) -> None:
        self._emit({}, self._open, failed)
        self._provider.shutdown()  # sends what is left

    def _emit(self, attributes: dict[str, str | float], roots: Sequence[Interval], failed: bool = False) -> None:
        """Start and end the spans of these intervals. The outermost ones get the attributes."""
        from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

        def emit(one: Interval, parent: Span | None) -> None:
            context = None if parent is None else set_span_in_context(parent)
            span = self._tracer.start_span(
                one.name, context, attributes=None if parent else attributes, start_time=self._nanoseconds(one.start)
            )
            if failed and parent is None:
                span.set_status(Status(StatusCode.ERROR, "the run ended with an error"))
            for inner in one.inside:
                emit(inner, span)
            span.end(self._nanoseconds(one.stop))

        for root in roots:
            emit(root, None)
        self._open = []

    def _nanoseconds(self, moment: float) -> int:
        return int((self._epoch + moment) * 1e9)


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
                    "run.otel.endpoint, or the variables OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS"
                )
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Reporting()
