"""No other user reaches a run's servers: tests every route of a real vLLM, every port of the run, and every file that
the run writes."""

import re
import secrets
from pathlib import Path

import httpx
import pytest

from tests.e2e import world
from tests.listening import LOOPBACK, listening

TOKEN = "marked-secret-0123456789abcdef"


def mark_the_token():
    secrets.token_urlsafe = lambda size: TOKEN
    secrets.token_hex = lambda size: TOKEN.replace("marked", "marked-board")


@pytest.mark.full
def test_servers_of_a_run_reject_requests_without_its_token_and_no_file_or_process_shows_the_token(tmp_path):
    options = [
        "run.max_steps=60",
        "run.save_steps=30",
        "rollout.weight_sync_transport=p2p",
        "run.trackers=[tensorboard]",
    ]
    with world.running(
        tmp_path, *options, "run.log_completions_steps=1", prepare=mark_the_token, launched=True
    ) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 1, "first step")
        family = world.family(trainer.pid)
        assert listening(family) == {LOOPBACK}, "something listens on another address than 127.0.0.1"
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in family]
        assert not [pid for pid in family if b"marked-" in Path(f"/proc/{pid}/environ").read_bytes()], (
            "the token is in an environment"
        )
        (port,) = {found[1] for words in commands if (found := re.search(r"--port[\0 ](\d+)", words))}
        url = f"http://127.0.0.1:{port}"
        known = {"Authorization": f"Bearer {TOKEN}"}
        routes = httpx.get(f"{url}/openapi.json", headers=known).json()["paths"]
        assert set("/collective_rpc /sleep /update_weights /pause /inference/v1/generate /v1/models".split()) <= set(
            routes
        )
        for path, verbs in routes.items():
            for verb in verbs:
                answer = httpx.request(verb, url + path, headers={"Authorization": "Bearer a-guess-at-the-token"})
                assert answer.status_code == (200 if path == "/health" else 401), (verb, path, answer.text)
        for path in ("/metrics", "/docs", "/openapi.json", "/collective_rpc?x=/health", "/health/../sleep", "/nothing"):
            assert httpx.get(url + path).status_code == 401, path
        run = trainer.wait()
    assert run.code == 0, run.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"resolved.yaml", "metrics.jsonl", "completions.jsonl", "vllm_0.log"} <= {file.name for file in files}
    assert not [file for file in files if b"marked-" in file.read_bytes()], "the token was written down"
    assert "marked-" not in run.out + run.err and not any("marked-" in words for words in commands)
