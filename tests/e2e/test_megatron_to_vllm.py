"""Weights from Megatron's shards reach a vLLM server exactly: it then equals a fresh server that loaded the exported
folder."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from megagrpo.types import SamplingParams
from tests.e2e.tiny_servers import (
    PROMPTS,
    connect,
    launch,
    mixture,
    model_folder,
    naive_logprobs,
    push_from_megatron,
    sampled,
    tied_llamas,
    weights,
)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (4, dict(tp=2, pp=2)),
        pytest.param(2, dict(pp=2), marks=pytest.mark.full),
        (4, dict(tp=2)),
    ],
    ids=["one process", "tp2_pp2", "pp2", "tp2_dp2"],
)
def test_a_server_synced_from_megatron_shards_equals_a_fresh_one_on_the_exported_folder(ranks, parallel, tmp_path):
    synced, fresh = tied_llamas()
    run_ranks(
        push_from_megatron, 1, {}, synced.engine, synced.folder, tmp_path / "other", synced.engine.weight_version + 1
    )
    synced.engine.weight_version += 1  # the ranks are forks and have their own client
    assert sampled(synced.engine) != fresh.sampled
    version = synced.engine.weight_version + 1
    read = run_ranks(push_from_megatron, ranks, parallel, synced.engine, fresh.folder, tmp_path / "exported", version)[
        0
    ]
    synced.engine.weight_version = version
    assert sampled(synced.engine) == fresh.sampled
    assert read == sum(t.nbytes for t in weights(fresh.folder).values())
    exported, original = load_file(tmp_path / "exported" / "model.safetensors"), weights(fresh.folder)
    assert exported.keys() == original.keys() and all(torch.equal(exported[name], original[name]) for name in original)


@pytest.fixture(
    scope="module",
    params=[
        "many_experts",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("deepseek_v2", "deepseek_v3", "gpt_oss")),
    ],
)
def with_experts(request):
    """A server on a model with experts in all blocks, or in all but the first."""
    if request.param == "many_experts":
        yield mixture()
        return
    folder = model_folder(request.param, 0)
    running = connect(launch(folder, request.param), folder)
    yield running
    running.launcher.stop()


def test_experts_that_lie_on_expert_parallel_ranks_reach_the_server_exactly(with_experts, tmp_path):
    greedy, engine, other = SamplingParams(0.0, 24), with_experts.engine, model_folder(with_experts.folder.name[:-1], 1)

    def answers() -> list:
        return [
            (group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist())
            for group in engine.generate(PROMPTS, 1, greedy, seed=0)
        ]

    def check(folder: Path) -> None:
        for prompt, (ids, logprobs) in zip(PROMPTS, answers(), strict=True):
            torch.testing.assert_close(torch.tensor(logprobs), naive_logprobs(folder, prompt, ids), atol=1e-4, rtol=0)

    def push(ranks: int, parallel: dict, folder: Path, out: str) -> int:
        version = engine.weight_version + 1
        read = run_ranks(push_from_megatron, ranks, parallel, engine, folder, tmp_path / out, version)[0]
        engine.weight_version = version  # the ranks are forks and have their own client
        return read

    fresh = answers()  # the server has just loaded its folder
    check(with_experts.folder)
    push(1, {}, other, "other")
    assert [ids for ids, _ in answers()] != [ids for ids, _ in fresh]
    check(other)
    total = sum(t.nbytes for t in weights(with_experts.folder).values())
    for parallel in (dict(ep=2), dict(tp=2, ep=2, etp=1)):
        read = push(2, parallel, with_experts.folder, f"back{len(parallel)}")
        assert read == total, "each byte is read once"
        back = answers()
        if not with_experts.folder.name.startswith("deepseek"):
            assert back == fresh
        for (ids, logprobs), (expected_ids, expected) in zip(back, fresh, strict=True):
            assert ids == expected_ids and logprobs == pytest.approx(expected, abs=1e-5)
        push(1, {}, other, f"other{len(parallel)}")
    push(1, {}, with_experts.folder, "own")  # for other tests on this server
