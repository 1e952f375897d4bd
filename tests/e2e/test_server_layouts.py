"""vLLM servers of pipeline stages, and of copies that share experts, get from a weight sync exactly the weights of
their workers."""

import pytest

from tests.e2e.test_two_workers import assert_log_probs, there_and_back
from tests.e2e.tiny_servers import Running, below, connect, launch, model_folder, weights
from tests.listening import LOOPBACK, listening


def bytes_of(running: Running, part: str = "") -> int:
    """Bytes of the model's tensors whose name contains `part`."""
    return sum(tensor.nbytes for name, tensor in weights(running.folder).items() if part in name)


def running_on(kind: str, **sizes) -> Running:
    folder = model_folder(kind, 0)
    return connect(launch(folder, f"{kind}_{'_'.join(sizes)}", **sizes), folder)


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
