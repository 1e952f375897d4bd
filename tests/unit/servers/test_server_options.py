"""Config keys for vLLM: the command line of a server, the requests of a step, their timeouts, and sleep."""

import contextlib
from pathlib import Path

import pytest

from megagrpo.config import load_config
from megagrpo.engine.client import VllmEngine
from megagrpo.rollout.collector import sampling_params
from megagrpo.servers import serving
from megagrpo.servers.launcher import Launcher
from megagrpo.trainer import engine_side, gpu_turns
from megagrpo.types import Prompt, SamplingParams, Truncation
from tests.unit.engine.stand_ins import StandIn, noting

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
VALUES = {  # override -> the arguments that must be on the command line
    "rollout.tp=2": ["--tensor-parallel-size", "2"],
    "rollout.pp=2": ["--pipeline-parallel-size", "2"],
    "rollout.max_num_seqs=7": ["--max-num-seqs", "7"],
    "rollout.gpu_memory_utilization=0.3": ["--gpu-memory-utilization", "0.3"],
    "rollout.enforce_eager=true": ["--enforce-eager"],
    "rollout.extra_args=[--model-impl, transformers]": ["--model-impl", "transformers"],
    "rollout.extra_args=[--no-enable-prefix-caching]": ["--no-enable-prefix-caching"],
}


def config(*overrides):
    return load_config(QUICKSTART, overrides)


def launcher(folder, *overrides):
    return serving.make_launcher(config(*overrides), folder, folder, "bfloat16")


def holds(command, words):
    return any(command[i : i + len(words)] == words for i in range(len(command)))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0", "1"])


@pytest.mark.parametrize("override", VALUES)
def test_a_key_of_the_rollout_is_an_argument_of_vllm(override, two_gpus, tmp_path):
    command, plain = (launcher(tmp_path, *words)._command(8000) for words in ([override], []))
    assert holds(command, VALUES[override]) and not holds(plain, VALUES[override])


def test_copies_that_share_experts_get_a_device_each(monkeypatch, tmp_path):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: list("01234567"))
    made = launcher(tmp_path, "rollout.dp=2", "rollout.pp=2", "rollout.enable_expert_parallel=true", "rollout.servers=2")
    command = made._command(8000)
    assert holds(command, ["--data-parallel-size", "2"]) and "--enable-expert-parallel" in command
    assert [made._environment(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(ValueError, match=r"rollout\.servers 3 x rollout\.tp 1 x rollout\.pp 2 x rollout\.dp 2 need 12 GPUs; 8 were given"):
        launcher(tmp_path, "rollout.dp=2", "rollout.pp=2", "rollout.enable_expert_parallel=true", "rollout.servers=3")


def test_a_server_holds_the_longest_prompt_with_the_longest_response(tmp_path):
    command = launcher(tmp_path, "rollout.max_prompt_length=100", "rollout.max_completion_length=28")._command(8000)
    assert holds(command, ["--max-model-len", "128"])


def test_nothing_turns_the_prefix_cache_of_vllm_off(two_gpus, tmp_path):
    assert not [word for word in launcher(tmp_path)._command(8000) if "prefix-caching" in word]


def test_as_many_servers_start_at_the_ports_that_follow(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    started = []
    monkeypatch.setattr(Launcher, "_launch", lambda self, index, port: started.append((index, port)))
    monkeypatch.setattr("megagrpo.servers.launcher.check_port", lambda host, port: None)
    made = launcher(tmp_path, "rollout.servers=3", "rollout.port=21000")
    made.start()
    made.servers.clear()
    made.stop()
    assert started == [(0, 21000), (1, 21001), (2, 21002)]


def test_a_step_samples_as_its_keys_say():
    """Four different numbers, so that none can be mistaken for another."""
    rollout = config(
        *("rollout.temperature=0.7", "rollout.top_p=0.8", "rollout.top_k=9", "rollout.min_p=0.05", "rollout.max_completion_length=33")
    ).rollout
    assert sampling_params(rollout, (2, 5)) == SamplingParams(0.7, 33, (2, 5), Truncation(top_p=0.8, top_k=9, min_p=0.05))


@pytest.mark.parametrize(("seconds", "asked"), [(0.5, 1), (20, 0)])
def test_a_request_that_takes_longer_than_its_timeout_goes_to_another_server(seconds, asked, monkeypatch):
    """Each of two servers gets one of two prompts; the slow server responds after 2 seconds."""
    monkeypatch.setattr("megagrpo.engine.client.LOOK_SECONDS", 0.02)
    limits = engine_side.engine_limits(config("rollout.urls=[http://127.0.0.1:1]", f"rollout.request_timeout={seconds}").rollout)
    with contextlib.closing(StandIn()) as quick, contextlib.closing(StandIn(delay=2.0)) as slow:
        engine = VllmEngine([slow.url, quick.url], str, **limits)
        groups = engine.generate([Prompt(i, (1, 2, i + 3), "") for i in range(2)], 1, SamplingParams(1.0, 4), 5)
    assert [len(group) for group in groups] == [1, 1] and len(quick.asked) == 1 + asked


@pytest.mark.parametrize(("adapters", "level"), [([], 2), (["lora.rank=8"], 2), (["lora.rank=8", "lora.sync=adapter"], 1)])
def test_servers_sleep_at_level_2_and_keep_the_weights_that_adapters_act_on(adapters, level, monkeypatch):
    """At level 2 vLLM drops its weights, and a sync of adapters would not restore them."""
    settings = config(*adapters)
    with noting() as (url, paths):
        monkeypatch.setattr(Launcher, "wait", lambda self, say: [url])
        gpu_turns.start_asleep(settings, Launcher(None, "."), print)
        engine = VllmEngine([url], str, sleeps=True, lora=settings.lora.syncs_adapters)
        engine.sleep()
        engine.fleet.end_sleep()
        engine.sleep(keeps_weights=True)  # for a checkpoint
    assert paths == [f"/sleep?level={level}"] * 2 + ["/sleep?level=1"]
