"""One vLLM server on two nodes: two `megagrpo serve` on this machine, each with a part of the server. Its log-probs are
transformers', a weight sync reaches every worker, and the server ends and restarts with any of its parts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import healthy
from megagrpo.engine.servers.launcher import free_ports
from tests.e2e.test_push_to_vllm import push_from_megatron
from tests.e2e.test_two_workers import LORA, as_the_merged_model, with_adapters
from tests.e2e.tiny_servers import PROMPTS, Running, below, greedy, model_folder, naive_logprobs, weights
from tests.e2e.world import alive, wait_for

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
TOKEN = "a-token-of-the-tests-1234"
OVERRIDES = "model.precision=fp32 rollout.placement=dedicated run.nodes=2 rollout.nodes_per_server=2 rollout.kv_cache_gb=1".split()
OVERRIDES += ["rollout.max_prompt_length=64", "rollout.max_completion_length=64"]


@dataclass
class Nodes:
    """The two commands, the first node's first, their output, and the server's client."""

    commands: list[subprocess.Popen]
    folder: Path
    engine: VllmEngine | None = None

    def out(self, node: int) -> str:
        return (self.folder / f"n{node}.out").read_text()


@contextmanager
def two_nodes(model: Path, folder: Path, *overrides: str) -> Iterator[Nodes]:
    """One server on two nodes. Asserts at the end that the commands end on a signal and leave no process."""
    (port,) = free_ports("127.0.0.1", 1)
    words = [str(QUICKSTART), f"model.path={model}", *OVERRIDES, *overrides, "--head", f"127.0.0.1:{port}"]
    words += ["--urls", str(folder / "urls"), "--logs", str(folder)]
    commands = []
    for node in (0, 1):
        environment = os.environ | {"SLURMD_NODENAME": f"n{node}", "SLURM_NODEID": str(node), "MEGAGRPO_TOKEN": TOKEN}
        command = [sys.executable, "-m", "megagrpo", "serve", *words]
        with (folder / f"n{node}.out").open("w") as out:
            commands.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
    nodes = Nodes(commands, folder)
    try:
        url = folder / "urls" / "n0.url"
        wait_for(lambda: url.exists() or commands[0].poll() is not None, "start of the server", 300)
        assert url.exists(), nodes.out(0) + nodes.out(1)
        nodes.engine = VllmEngine(url.read_text().split(), str, max_num_seqs=64, token=TOKEN)
        yield nodes
    finally:
        family = [pid for command in commands for pid in below(command.pid)]
        for command in commands:
            command.terminate()
        codes = [command.wait(60) for command in commands]
    assert codes == [0, 0], nodes.out(0) + nodes.out(1)
    assert family and not [pid for pid in family if alive(pid)]


def assert_log_probs(engine: VllmEngine, folder: Path) -> list[tuple]:
    """Return the server's greedy responses, after asserting that their log-probs equal transformers' on `folder`."""
    responses = greedy(engine)
    for prompt, (ids, logprobs) in zip(PROMPTS, responses, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), naive_logprobs(folder, prompt, ids), rtol=0, atol=1e-3)
    return responses


def assert_synced(nodes: Nodes, kind: str, ranks: int, parallel: dict) -> int:
    """Push other weights and the server's own by p2p, with checks of the responses; return the bytes that the workers
    read each time."""
    own, other = model_folder(kind, 0), model_folder(kind, 1)
    fresh = assert_log_probs(nodes.engine, own)
    read = set()
    for version, folder in enumerate((other, own), 1):
        (reports, _, _) = run_ranks(push_from_megatron, ranks, parallel, nodes.engine, [folder], version)[0]
        nodes.engine.weight_version = version  # the ranks are forks and have their own client
        assert (assert_log_probs(nodes.engine, folder) == fresh) == (folder == own)
        read.add(reports[0][1])
    (count,) = read
    return count


def bytes_of(kind: str, part: str = "") -> int:
    """Bytes of the model's tensors whose name contains `part`."""
    return sum(tensor.nbytes for name, tensor in weights(model_folder(kind, 0)).items() if part in name)


def workers_below(command: subprocess.Popen) -> list[int]:
    return [pid for pid in below(command.pid) if b"::Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.full
def test_two_nodes_are_one_server_that_gets_verified_weights(tmp_path):
    with two_nodes(model_folder("llama", 0), tmp_path, "rollout.tp=2") as nodes:
        assert [len(workers_below(command)) for command in nodes.commands] == [1, 1]
        read = assert_synced(nodes, "llama", 2, dict(tp=2))
    assert bytes_of("llama") < read < 1.05 * bytes_of("llama")  # both workers read the norms


@pytest.mark.full
def test_adapters_alone_reach_the_workers_of_both_nodes(tmp_path):
    folder = model_folder("llama", 0)
    with two_nodes(folder, tmp_path, "rollout.tp=2", "lora.rank=4", "lora.sync=adapter") as nodes:
        nodes.engine.adapters = 1
        running, read = Running(folder, None, nodes.engine), set()
        for version, salt in enumerate("ab", 1):
            out, here = tmp_path / salt, lambda url: False
            read.add(run_ranks(with_adapters, 1, {}, salt, nodes.engine, folder, out, version, True, LORA, here)[0])
            nodes.engine.weight_version = version  # the ranks are forks and have their own client
            as_the_merged_model(running, out)
    assert len(read) == 1 and read.pop() % 2 == 0


@pytest.mark.full
def test_a_node_may_have_several_stages_and_workers(tmp_path):
    with two_nodes(model_folder("llama", 0), tmp_path, "rollout.tp=2", "rollout.pp=2") as nodes:
        assert [len(workers_below(command)) for command in nodes.commands] == [2, 2]
        assert_synced(nodes, "llama", 1, {})


@pytest.mark.full
def test_copies_on_two_nodes_share_their_experts(tmp_path):
    with two_nodes(
        model_folder("qwen3_moe", 0), tmp_path, "rollout.dp=2", "rollout.enable_expert_parallel=true"
    ) as nodes:
        read = assert_synced(nodes, "qwen3_moe", 2, dict(ep=2))
    assert read == 2 * bytes_of("qwen3_moe") - bytes_of("qwen3_moe", ".experts.")


@pytest.mark.full
@pytest.mark.parametrize("node", [0, 1])
def test_a_server_restarts_when_a_worker_of_any_node_dies(node, tmp_path):
    with two_nodes(model_folder("llama", 0), tmp_path, "rollout.tp=2") as nodes:
        (url,), fresh = nodes.engine.urls, greedy(nodes.engine)
        others = workers_below(nodes.commands[1 - node])
        os.kill(*workers_below(nodes.commands[node]), signal.SIGKILL)
        wait_for(lambda: "restarting it, 1 of 3 times" in nodes.out(0) and healthy(url), "restart of the server", 300)
        assert not [pid for pid in others if alive(pid)]
        assert greedy(VllmEngine([url], str, max_num_seqs=64, token=TOKEN)) == fresh
    assert ("its part on node 1 (n1) ended with exit code" in nodes.out(0)) == (node == 1)


@pytest.mark.full
def test_a_server_without_one_of_its_nodes_is_named_and_ends_on_all_nodes(tmp_path):
    with (
        pytest.raises(AssertionError, match="it cannot restart without this node"),
        two_nodes(model_folder("llama", 0), tmp_path, "rollout.tp=2") as nodes,
    ):
        nodes.commands[1].terminate()
        assert nodes.commands[0].wait(60) == 1
