"""The experts that vLLM reports for a response are the ones it used: equal to transformers' routers in float32, for
tokens of cached prefixes, preempted requests, aborted responses and later turns too."""

from __future__ import annotations

import functools
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from ranks import run_ranks

from megagrpo.data.packing.routed_experts import joined_routes
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineError
from megagrpo.engine.responses import read_response
from megagrpo.proof.audit.naive import Routing, load_model
from megagrpo.types import Prompt, Rollout, SamplingParams
from tests.e2e.tiny_servers import Running, connect, launch, mixture, model_folder, routes_of, tied_llamas

SAMPLING = SamplingParams(1.0, 24)
LONG = tuple((11 * k) % 251 + 3 for k in range(70))  # two whole blocks of the prefix cache, and a part
BLOCKS = 14  # of 32 tokens, for a server that must preempt requests


def server(kind: str, name: str, **options) -> Running:
    folder = model_folder(kind)
    return connect(launch(folder, name, returns_routes=True, **options), folder, routes=routes_of(kind))


@pytest.fixture
def running():
    return mixture()


@functools.cache
def oracle(kind: str) -> torch.nn.Module:
    """transformers' model with plain attention."""
    return load_model(model_folder(kind), "float32")


def routers_choice(kind: str, token_ids: list[int]) -> np.ndarray:
    """Experts [L, M, k], sorted, that transformers' routers take for this text."""
    model = oracle(kind)
    with torch.no_grad(), Routing(model, None) as routing:
        model(torch.tensor([token_ids]))
    return torch.stack(routing.taken, dim=1).sort(-1).values.numpy()


def check(kind: str, rollout: Rollout) -> int:
    """Compare the routes of a rollout with transformers'; return how many there are."""
    ids = [*rollout.prompt.token_ids, *rollout.response_ids.tolist()]
    assert rollout.routes is not None and len(rollout.routes) == len(ids) - 1
    assert np.array_equal(np.sort(rollout.routes, -1), routers_choice(kind, ids)[:-1])
    return rollout.routes[..., 0].size


def test_the_routes_of_groups_are_those_of_transformers(running):
    prompts = [Prompt(0, LONG, ""), Prompt(1, LONG[:5], ""), Prompt(2, (*LONG, 7, 9), "")]
    groups = running.engine.generate(prompts, 4, SAMPLING, seed=1)
    # the prompts share blocks with each other and with the responses of their groups
    assert sum(check("many_experts", rollout) for group in groups for rollout in group) > 800
    cached = httpx.get(f"{running.engine.urls[0]}/metrics", headers=bearer(running)).text
    assert float(re.search(r"^vllm:prefix_cache_hits_total.* ([0-9.e+]+)$", cached, re.MULTILINE)[1]) >= 64


def bearer(running: Running) -> dict[str, str]:
    return {"Authorization": f"Bearer {running.launcher.token}"}


def test_a_later_turn_adds_the_routes_of_its_own_tokens(running):
    prompt, (first,) = Prompt(5, LONG[:9], ""), running.engine.extend([Prompt(5, LONG[:9], "")], [SAMPLING], [3])
    longer = (*prompt.token_ids, *first.response_ids.tolist(), 8, 9, 10)  # a tool's answer
    (second,) = running.engine.extend([Prompt(5, longer, "")], [SAMPLING], [4])
    whole = [*longer[len(prompt.token_ids) :], *second.response_ids.tolist()]
    routes = joined_routes(first.routes, second.routes)
    check("many_experts", replace(second, prompt=prompt, response_ids=np.array(whole, np.int32), routes=routes))


def test_an_aborted_response_has_the_routes_of_the_tokens_that_were_read(running):
    url, params = running.engine.urls[0], dict(max_tokens=55, temperature=0.0, logprobs=0, detokenize=False)
    body = dict(token_ids=LONG, sampling_params=params | dict(ignore_eos=True), request_id="to-abort")
    answers = []

    def ask() -> None:
        answer = httpx.post(f"{url}/inference/v1/generate", json=body, headers=bearer(running), timeout=60)
        answers.append(read_response(answer.content, 60))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        time.sleep(0.02)
        abort = {"request_ids": ["to-abort"]}
        httpx.post(f"{url}/inference/v1/abort_requests", json=abort, headers=bearer(running), timeout=60)
    (answer,) = answers
    if answer.token_ids.size:
        assert len(answer.routes) == len(LONG) + answer.token_ids.size - 1
    assert answer.finish_reason in ("abort", "length")


def test_a_server_that_sends_no_routes_is_an_error_with_the_flag():
    dense, shape = tied_llamas()[0].launcher, routes_of("qwen3_moe")
    engine = VllmEngine(dense.urls, str, max_num_seqs=64, logs=dense.logs, any_version=True, routes=shape)
    with pytest.raises(EngineError, match=r"sent no routed_experts; start it with --enable-return-routed-experts"):
        engine.generate([Prompt(0, LONG, "")], 2, SAMPLING, seed=1)


@pytest.mark.full
def test_requests_that_were_preempted_keep_their_routes():
    running = server("qwen3_moe", "preempted", extra_args=("--num-gpu-blocks-override", str(BLOCKS)))
    try:
        prompts = [Prompt(i, tuple(5 + i + 7 * k % 900 for k in range(40)), "") for i in range(6)]
        groups = running.engine.generate(prompts, 2, SamplingParams(1.0, 60), seed=1)
        assert sum(check("qwen3_moe", rollout) for group in groups for rollout in group) > 500
        said = httpx.get(f"{running.engine.urls[0]}/metrics", headers=bearer(running)).text
        assert float(re.search(r"^vllm:num_preemptions_total.* ([0-9.e+]+)$", said, re.MULTILINE)[1]) > 0
    finally:
        running.launcher.stop()


@pytest.mark.full
def test_the_routes_of_gpt_oss_are_those_of_transformers():
    running = server("gpt_oss", "routes_gpt_oss", omp_threads=2)
    try:
        groups = running.engine.generate([Prompt(0, LONG, ""), Prompt(1, LONG[:5], "")], 2, SAMPLING, seed=1)
        # alone: no other request keeps the second thread busy
        groups += running.engine.generate([Prompt(2, LONG, "")], 1, SAMPLING, seed=1)
        assert sum(check("gpt_oss", rollout) for group in groups for rollout in group) > 100
    finally:
        running.launcher.stop()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_latent_attention_has_routes_without_a_prefix_cache(kind):
    running = server(kind, f"routes_{kind}")
    try:
        prompts = [Prompt(0, LONG, ""), Prompt(1, LONG[:5], ""), Prompt(2, LONG[9:50], "")]
        groups = running.engine.generate(prompts, 2, SAMPLING, seed=1)
        assert sum(check(kind, rollout) for group in groups for rollout in group) > 200
    finally:
        running.launcher.stop()


def free_blocks_after_a_long_text() -> tuple[int, int]:
    """Blocks that are free, and kept, after 40 blocks of one request without keys; there is room for six."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
    from vllm.distributed.aux_output_connector.worker import _WorkerRequestState

    from megagrpo.sync.vllm_side.cpu.cpu_routed_experts import _drop_blocks

    limits = dict(max_num_seqs=1, max_num_batched_tokens=128, max_concurrent_batches=1)
    buffer = RoutedExpertsBuffer(np.dtype(np.uint8), (2, 3), 32, **limits)
    request = _WorkerRequestState()
    connector = SimpleNamespace(_buffer=buffer, _requests={"request": request})
    for start in range(0, 32 * 40, 32):
        completed = buffer.capture("request", start, np.zeros((32, 2, 3), np.uint8))
        request.pending_blocks += [(first, buffer.retain_block(rows)) for first, rows in completed]
        _drop_blocks(connector)
    return len(buffer._free_slots), len(request.pending_blocks)


def test_blocks_without_keys_leave_room_for_later_ones():
    assert run_ranks(free_blocks_after_a_long_text, 1) == [(6, 0)]


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [dict(tp=2), dict(tp=2, expert_parallel=True), dict(dp=2, expert_parallel=True)], ids=str
)
def test_a_server_of_two_workers_sends_whole_routes(options):
    running = server("qwen3_moe", "routes_of_two", **options)
    try:
        groups = running.engine.generate([Prompt(0, LONG, ""), Prompt(1, LONG[:5], "")], 4, SAMPLING, seed=1)
        assert sum(check("qwen3_moe", rollout) for group in groups for rollout in group) > 100
    finally:
        running.launcher.stop()
