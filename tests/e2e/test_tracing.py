"""A whole run as Prometheus and an OpenTelemetry collector see it, with a real vLLM server."""

import json
import os
import signal
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import world
from tests.unit.records.sinks import test_otel, test_prometheus
from tests.unit.records.sinks.test_otel import collector, spans, values
from tests.unit.records.sinks.test_prometheus import get, samples


def test_a_run_is_scraped_with_its_servers_and_sends_a_trace_per_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_PORT", "0")
    trackers = f"{test_otel.FILE}:OtelSink,{test_prometheus.FILE}:PrometheusSink"
    with collector() as (_, got):
        with world.running(tmp_path, f"run.trackers=[{trackers}]", "run.max_steps=1000", "run.save_steps=1") as trainer:
            world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
            address = (tmp_path / "run" / "prometheus_url").read_text().strip()
            pages = [one["labels"]["__metrics_path__"] for one in json.loads(get(f"{address}/targets")[1])]
            key = (tmp_path / "run" / "prometheus_key").read_text()
            trainer_page, server_page = (get(address + page, Authorization=f"Bearer {key}")[1] for page in pages)
            os.kill(trainer.pid, signal.SIGTERM)
            run = trainer.wait()
    assert run.code == 128 + signal.SIGTERM, run.err
    assert pages == ["/metrics", "/servers/0/metrics"]
    found = samples(trainer_page)
    step = int(found["megagrpo_step", "step"][0])
    assert step >= 2 and found["megagrpo_steps_total", None][0] == step
    assert found["megagrpo_reward", "reward"][0] == run.metrics[step - 1]["reward"]
    assert found["megagrpo_generated_tokens_total", None][0] == sum(
        line["num_generated_tokens"] for line in run.metrics[:step]
    )
    served = {family.name for family in text_string_to_metric_families(server_page)}
    assert {"vllm:generation_tokens", "vllm:num_requests_running"} <= served
    found = spans(got)
    names = Counter(name.split("#")[0] for name in found)
    steps = [span for span in found.values() if span.name == "step" and "megagrpo.step" in values(span.attributes)]
    assert [values(span.attributes)["megagrpo.step"] for span in steps] == list(range(1, len(run.metrics) + 1))
    assert [values(span.attributes)["megagrpo.reward"] for span in steps] == [line["reward"] for line in run.metrics]
    parents = {span.span_id: span for span in found.values()}
    for span, line in zip(steps, run.metrics, strict=True):
        inside = [one for one in found.values() if one.parent_span_id == span.span_id]
        seconds = sum(one.end_time_unix_nano - one.start_time_unix_nano for one in inside if one.name == "train") / 1e9
        assert {one.name for one in inside} >= {"generate", "train", "sync"}
        assert abs(seconds - line["time/train"]) < 1e-3
    saves = [span for span in found.values() if span.name == "save"]
    assert len(saves) >= 2 and {parents[span.parent_span_id].name for span in saves if span.parent_span_id} == {
        "between_steps"
    }
    assert names["save"] >= len(run.metrics)
