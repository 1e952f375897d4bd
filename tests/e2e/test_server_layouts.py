"""vLLM servers of pipeline stages, and of copies that share experts, get from a weight sync exactly the weights of
their workers."""

import httpx
import pytest
from ranks import run_ranks

from tests.e2e.test_two_workers import LORA, as_the_merged_model, assert_log_probs, there_and_back, with_adapters
from tests.e2e.tiny_servers import Running, below, connect, launch, model_folder, weights
from tests.listening import LOOPBACK, listening


def bytes_of(running: Running, part: str = "") -> int:
    """Bytes of the model's tensors whose name contains `part`."""
    return sum(tensor.nbytes for name, tensor in weights(running.folder).items() if part in name)


def running_on(kind: str, **sizes) -> Running:
    folder = model_folder(kind, 0)
    return connect(launch(folder, f"{kind}_{'_'.join(sizes)}", **sizes), folder)


@pytest.mark.full
def test_stages_get_their_layers(tmp_path):
    running = running_on("llama", pp=2)
    try:
        assert_log_probs(running)
        assert listening(below(running.launcher.servers[0].supervisor.pid)) == {LOOPBACK}
        (read,) = there_and_back(running, [(2, dict(tp=2))], tmp_path)[:1]
        # tied: the last stage has the embedding as its head
        assert read == bytes_of(running) + bytes_of(running, "embed_tokens")
        assert_log_probs(running)
    finally:
        running.launcher.stop()


@pytest.mark.full
def test_copies_get_the_attention_and_their_experts(tmp_path):
    running = running_on("qwen3_moe", dp=2, expert_parallel=True)
    try:
        assert_log_probs(running)
        assert listening(below(running.launcher.servers[0].supervisor.pid)) == {LOOPBACK}
        (read,) = there_and_back(running, [(2, dict(ep=2))], tmp_path)[:1]
        assert read == 2 * bytes_of(running) - bytes_of(running, ".experts.")
        assert_log_probs(running)
    finally:
        running.launcher.stop()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "sizes"), [("llama", dict(pp=2)), ("qwen3_moe", dict(tp=2, expert_parallel=True))], ids=["pp", "ep"]
)
def test_adapters_alone_reach_all_workers(kind, sizes, tmp_path):
    folder = model_folder(kind, 0)
    lora = LORA.model_copy(update=dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    settings = dict(lora_rank=lora.rank, lora_modules=tuple(lora.target_modules))
    running = connect(launch(folder, f"{kind}_adapters", **sizes, **settings), folder, adapters=1)
    try:
        for version, salt in enumerate("ab", 1):
            out = tmp_path / salt
            read = run_ranks(with_adapters, 1, {}, salt, running.engine, folder, out, version, True, lora)[0]
            running.engine.weight_version = version
            as_the_merged_model(running, out)
        assert read % 2 == 0  # two workers
        (url,) = running.engine.urls
        answer = httpx.post(f"{url}/collective_rpc", json={"method": "adapter_problem", "args": [{}]}, timeout=60)
        told = "adapter of layers.0.self_attn.k_proj: the checksums differ from the written ones"
        assert answer.json()["results"] == [told] * 2
    finally:
        running.launcher.stop()
