"""Config keys for vLLM: the command line of a server, the requests of a step, their timeouts, and sleep."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megagrpo.config import load_config
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.requests import sampling_params as request_params
from megagrpo.engine.servers import serving
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import NodePorts, ServerNode, ServerOptions
from megagrpo.families.family_index import FAMILIES
from megagrpo.platform.process.variables import TOKEN_FILE_VARIABLE
from megagrpo.trainer import engine_side
from megagrpo.trainer.gpu import gpu_sharing as gpu_turns
from megagrpo.types import Prompt, SamplingParams, Truncation
from tests.family_examples import RELEASES
from tests.unit.engine.stand_ins import StandIn, noting

TOKEN = "a-token-of-the-tests-1234"
QUICKSTART = Path(__file__).parents[4] / "configs/quickstart.yaml"
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


def test_a_server_of_structured_outputs_has_a_tokenizer_and_the_trainers_library(two_gpus, tmp_path):
    command = launcher(tmp_path, "rollout.structured_outputs.regex=a")._command(8000)
    assert holds(command, ["--structured-outputs-config", '{"backend": "xgrammar"}'])
    assert "--skip-tokenizer-init" not in command
    assert "--structured-outputs-config" not in launcher(tmp_path)._command(8000)


def test_a_server_loads_a_tokenizer_only_to_find_stop_strings_or_tool_calls(two_gpus, tmp_path):
    stops = ["rollout.stop=[x]", "model.tokenizer=/tokenizer"]
    calls = ["multi_turn.tools=[calculator]", "multi_turn.tool_parser=vllm:hermes"]
    plain, stopping, calling = (launcher(tmp_path, *words)._command(8000) for words in ([], stops, calls))
    assert "--skip-tokenizer-init" in plain and "--tokenizer" not in plain
    assert holds(stopping, ["--tokenizer", "/tokenizer"]) and not {
        "--skip-tokenizer-init",
        "--enable-auto-tool-choice",
    } & set(stopping)
    assert holds(calling, ["--tokenizer", str(tmp_path)]) and holds(calling, ["--tool-call-parser", "hermes"])
    assert "--enable-auto-tool-choice" in calling and "--skip-tokenizer-init" not in calling


def test_a_server_that_takes_adapters_has_room_for_those_of_all_versions(two_gpus, tmp_path):
    facts = dict(model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(facts | dict(intermediate_size=64, vocab_size=64)))
    words = ["lora.rank=20", "lora.sync=adapter", "lora.target_modules=[q_proj, o_proj]"]
    ahead = ["rollout.max_staleness=2", "rollout.in_flight=wait", "rollout.placement=dedicated"]
    ahead += ["algorithm.importance_correction=token_truncate"]
    for more, used, held in (([], "1", "1"), (ahead, "3", "4")):
        command = launcher(tmp_path, *words, *more)._command(8000)
        assert holds(command, ["--max-loras", used, "--max-cpu-loras", held, "--max-lora-rank", "32"])
        assert holds(command, ["--lora-target-modules", "o_proj", "q_proj"])
        assert "--weight-transfer-config" not in command
    assert "--weight-transfer-config" in launcher(tmp_path, *words, "model.base_storage=nf4")._command(8000)


def test_copies_that_share_experts_get_a_device_each(monkeypatch, tmp_path):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: list("01234567"))
    made = launcher(
        tmp_path, "rollout.dp=2", "rollout.pp=2", "rollout.enable_expert_parallel=true", "rollout.servers=2"
    )
    command = made._command(8000)
    assert holds(command, ["--data-parallel-size", "2"]) and "--enable-expert-parallel" in command
    assert [made._environment(index)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)] == ["0,1,2,3", "4,5,6,7"]
    with pytest.raises(
        ValueError,
        match=r"rollout\.servers 3 x rollout\.tp 1 x rollout\.pp 2 x rollout\.dp 2 need 12 GPUs; 8 were given",
    ):
        launcher(tmp_path, "rollout.dp=2", "rollout.pp=2", "rollout.enable_expert_parallel=true", "rollout.servers=3")


def test_a_server_on_several_nodes_has_a_part_on_each(monkeypatch, tmp_path):
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: list("01234567"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    sizes = ("rollout.tp=8", "rollout.dp=2", "rollout.enable_expert_parallel=true", "rollout.nodes_per_server=2")
    made = [
        serving.make_launcher(
            config(*sizes, "rollout.placement=dedicated", "run.nodes=3"),
            tmp_path,
            tmp_path,
            "bfloat16",
            num_servers=1,
            node=node,
            token=TOKEN,
        )
        for node in (ServerNode(0, "127.0.0.1", "127.0.0.1"), ServerNode(1, "127.0.0.2", "127.0.0.1"))
    ]
    for launcher in made:
        launcher._ports = NodePorts(21001, 21002)
    first, second = (launcher._command(8000) for launcher in made)
    for rank, command in enumerate((first, second)):
        assert holds(
            command, ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", "21001"]
        )
        assert holds(command, ["--data-parallel-rpc-port", "21002"]) and holds(command, ["--tensor-parallel-size", "8"])
    assert (
        holds(first, ["-m", "vllm.entrypoints.openai.api_server"])
        and holds(first, ["--port", "8000"])
        and "--headless" not in first
    )
    assert (
        holds(second, ["-m", "megagrpo.sync.vllm_side.headless"]) and "--port" not in second and "--headless" in second
    )
    environments = [launcher._environment(0) for launcher in made]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments] == ["0,1,2,3,4,5,6,7"] * 2
    assert [env["VLLM_HOST_IP"] for env in environments] == ["127.0.0.1", "127.0.0.2"]
    assert {env[name] for env in environments for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} == {"lo"}
    assert [TOKEN_FILE_VARIABLE in env for env in environments] == [True, False]  # only the HTTP server reads the token


def test_servers_on_several_nodes_are_not_started_on_one(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"rollout\.nodes_per_server: 2, but this command starts servers on this host only; start them with",
    ):
        launcher(tmp_path, "rollout.tp=2", "rollout.nodes_per_server=2", "rollout.placement=dedicated", "run.nodes=3")


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.gpu_only])
def test_a_family_that_vllm_serves_on_gpus_only_is_refused_before_a_server_starts(kind, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[kind]))
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(f"model.path: {FAMILIES[kind].gpu_only} ({kind}); use a GPU")):
        launcher(tmp_path)
    monkeypatch.setattr(serving.device, "visible_gpus", lambda: ["0", "1"])
    assert launcher(tmp_path)


def test_a_server_holds_the_longest_prompt_with_the_longest_response(tmp_path):
    command = launcher(tmp_path, "rollout.max_prompt_length=100", "rollout.max_completion_length=28")._command(8000)
    assert holds(command, ["--max-model-len", "128"])


def test_nothing_turns_the_prefix_cache_of_vllm_off(two_gpus, tmp_path):
    assert not [word for word in launcher(tmp_path)._command(8000) if "prefix-caching" in word]


def test_as_many_servers_start_at_the_ports_that_follow(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    started = []
    monkeypatch.setattr(Launcher, "_launch", lambda self, index, port: started.append((index, port)))
    monkeypatch.setattr("megagrpo.engine.servers.launcher.check_port", lambda host, port: None)
    made = launcher(tmp_path, "rollout.servers=3", "rollout.port=21000")
    made.start()
    made.servers.clear()
    made.stop()
    assert started == [(0, 21000), (1, 21001), (2, 21002)]


class EndTokens:
    thinking = None
    """Stands for a tokenizer with two end tokens."""

    eos_token_ids = (2, 5)


def test_a_step_samples_as_its_keys_say():
    """Four different numbers, so that none can be mistaken for another."""
    rollout = config(
        *(
            "rollout.temperature=0.7",
            "rollout.top_p=0.8",
            "rollout.top_k=9",
            "rollout.min_p=0.05",
            "rollout.max_completion_length=33",
        )
    ).rollout
    expected = SamplingParams(0.7, 33, (2, 5), Truncation(top_p=0.8, top_k=9, min_p=0.05))
    assert sampling_of(rollout, EndTokens()) == expected
    stopping = rollout.model_copy(update={"stop": ["</answer>"], "include_stop_str_in_output": False})
    assert sampling_of(stopping, EndTokens()) == replace(expected, stop=("</answer>",), include_stop=False)


def test_a_request_has_the_changes_of_logits_that_its_keys_say():
    names = ("logit_bias.29=-100", "repetition_penalty=1.1")
    rollout = config(*(f"rollout.{name}" for name in names), "rollout.structured_outputs.choice=[a, b]").rollout
    sent = request_params(sampling_of(rollout))
    plain = request_params(sampling_of(config().rollout))
    assert plain["repetition_penalty"] == 1
    assert {name: value for name, value in sent.items() if plain.get(name) != value} == dict(
        logit_bias={29: -100}, repetition_penalty=1.1
    ) | dict(structured_outputs={"grammar": 'root ::= "a" | "b"'})


@pytest.mark.parametrize(("seconds", "asked"), [(2, 1), (20, 0)])
def test_a_request_that_takes_longer_than_its_timeout_goes_to_another_server(seconds, asked, monkeypatch):
    """Each of two servers gets one of two prompts; the slow server responds late."""
    monkeypatch.setattr("megagrpo.engine.client.LOOK_SECONDS", 0.02)
    limits = engine_side.engine_limits(
        config("rollout.urls=[http://127.0.0.1:1]", f"rollout.request_timeout={seconds}").rollout
    )
    with contextlib.closing(StandIn()) as quick, contextlib.closing(StandIn(delay=5.0 if asked else 0.5)) as slow:
        engine = VllmEngine([slow.url, quick.url], str, **limits)
        groups = engine.generate([Prompt(i, (1, 2, i + 3), "") for i in range(2)], 1, SamplingParams(1.0, 4), 5)
    assert [len(group) for group in groups] == [1, 1] and len(quick.asked) == 1 + asked


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ([], 2),
        (["lora.rank=8"], 2),
        (["lora.rank=8", "lora.sync=adapter"], 1),
        (["data.images=true"], 1),
        (["data.images=true", "model.freeze_vision_tower=false"], 2),
    ],
)
def test_servers_sleep_at_level_2_and_keep_weights_that_syncs_leave_out(options, level, monkeypatch):
    """At level 2 vLLM drops its weights. A sync of adapters would not restore them, and a frozen tower is not sent."""
    settings = config(*options)
    with noting() as (url, paths):
        monkeypatch.setattr(Launcher, "wait", lambda self, say: [url])
        gpu_turns.start_asleep(Launcher(ServerOptions("", "float32", 64), Path()), settings.leaves_weights, 60.0, print)
        engine = VllmEngine([url], str, sleeps=True, adapters=settings.synced_adapters, towers=settings.towers)
        engine.sleep()
        engine.fleet.end_sleep()
        engine.sleep(keeps_weights=True)  # for a checkpoint
    assert paths == [f"/sleep?level={level}"] * 2 + ["/sleep?level=1"]
