"""The command line and the environment of a vLLM server, or of one node's part of a server on several nodes."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megagrpo.engine.http.access import GUARD, interface_addresses
from megagrpo.engine.servers.options import NodePorts, ServerNode, ServerOptions
from megagrpo.families.shared.precisions import QUANTIZATION, TEXT_CONFIG
from megagrpo.loopback import LOOPBACK, LOOPBACK_ADDRESS
from megagrpo.platform.process.environment import inherited
from megagrpo.platform.process.variables import ENVIRONMENT, MALLOC, OPENMP, TOKEN_FILE_VARIABLE

PLUGIN = Path(__file__).parents[2] / "sync" / "vllm_side"
MAX_BATCHED_TOKENS = 4096  # tokens of one prefill batch on a CPU
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM allocates adapter slots for
IMAGE_CACHE_GB = 4  # host memory in which a server keeps the pixels of images

# Flags by which a sleeping server also frees the pools of CUDA graphs and NCCL's buffers.
SLEEP_FLAGS = ("--sleep-mode-offload-cudagraph", "--enable-nccl-comm-suspend")


def server_command(
    o: ServerOptions,
    host: str,
    port: int,
    *,
    gpu: bool,
    guarded: bool,
    node: ServerNode | None = None,
    ports: NodePorts | None = None,
) -> list[str]:
    """Return the command of a server that listens on `host` and `port`; with `guarded` it requires its token.

    With `node` it is the command of this node's part of a server. Only the first node's part has an HTTP server.
    `ports` belong to the first node.
    """
    headless = node is not None and node.index > 0
    flags: dict[str, object] = {
        flag: value if isinstance(value, str) else json.dumps(value) for flag, value in o.family_flags.items()
    }
    flags |= _model_flags(o) | _image_flags(o) | _adapter_flags(o) | _device_flags(o, gpu)
    flags["--headless"] = headless
    if not headless:
        flags |= {"--host": host, "--port": port, "--uvicorn-log-level": "warning"}
        flags["--middleware"] = GUARD if guarded else None
    if node is not None and ports is not None:
        flags |= {"--nnodes": o.nodes, "--node-rank": node.index, "--master-addr": node.first}
        flags |= {"--master-port": ports.rendezvous, "--data-parallel-rpc-port": ports.handshake if o.dp > 1 else None}
    module = "megagrpo.sync.vllm_side.headless" if headless else "vllm.entrypoints.openai.api_server"
    program = ["-m", module] if gpu else [str(PLUGIN / "vllm_main.py")]
    return [sys.executable, *program, *_words(flags), *o.extra_args]


def _words(flags: dict[str, object]) -> list[str]:
    """Return flags as words. True: a flag without a value; None and False: left out."""
    words: list[str] = []
    for flag, value in flags.items():
        if value is not None and value is not False:
            values = value if isinstance(value, tuple) else (value,)
            words += [flag] if value is True else [flag, *map(str, values)]
    return words


def _model_flags(o: ServerOptions) -> dict[str, object]:
    """Return the flags of the model, its layout, its tokens and its responses."""
    return {
        "--model": o.model,
        "--served-model-name": "policy",
        "--dtype": o.dtype,
        "--max-model-len": o.max_model_len,
        "--max-num-seqs": o.max_num_seqs,
        "--tensor-parallel-size": o.tp,
        "--pipeline-parallel-size": o.pp,
        "--data-parallel-size": o.dp,
        "--enable-expert-parallel": o.expert_parallel,
        "--enable-return-routed-experts": o.returns_routes,
        "--quantization": o.quantization,
        "--load-format": "megagrpo" if o.packed else None,
        "--hf-overrides": _config_overrides(o),
        # log-probs of the distribution that is sampled from, temperature included
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": "megagrpo.sync.vllm_side.worker_verbs.WorkerVerbs",
        "--tool-call-parser": o.tool_parser,
        "--enable-auto-tool-choice": o.tool_parser is not None,
        "--tokenizer": (o.tokenizer or o.model) if o.loads_tokenizer else None,
        "--skip-tokenizer-init": not o.loads_tokenizer,
        # the one that the trainer knows: vLLM's default chooses another one for some JSON schemas
        "--structured-outputs-config": json.dumps({"backend": "xgrammar"}) if o.constrains else None,
        "--enable-scale-out": True,
        "--no-enable-log-requests": True,
    }


def _config_overrides(o: ServerOptions) -> str | None:
    """Return the values that replace those of config.json, if any: a family's, and for packed weights that vLLM loads
    them as dense ones."""
    overrides = dict(o.family_flags.get("--hf-overrides", {}))
    if o.packed:
        dense = {QUANTIZATION: None}
        overrides |= {TEXT_CONFIG: overrides.get(TEXT_CONFIG, {}) | dense} if o.packed_text else dense
    return json.dumps(overrides) if overrides else None


def _image_flags(o: ServerOptions) -> dict[str, object]:
    """Return the flags of images in prompts, or of a multimodal model without them."""
    if not o.images:
        return {"--language-model-only": o.text_only}
    return {
        "--language-model-only": o.text_only,
        # pixels arrive as the trainer's processor made them; otherwise vLLM would normalise them again
        "--no-mm-device-do-normalize": True,
        # pixels by hash, in host memory, which requests name; data-parallel copies would not find each other's
        "--mm-processor-cache-gb": IMAGE_CACHE_GB if o.dp == 1 else 0,
        "--limit-mm-per-prompt": json.dumps({"image": 999, "video": 0}),
    }


def _adapter_flags(o: ServerOptions) -> dict[str, object]:
    """Return the flags of LoRA, and of updates of the model's own weights."""
    flags: dict[str, object] = {}
    if o.lora_rank:
        slots = next(rank for rank in LORA_RANKS if rank >= o.lora_rank)
        # with several adapters, one more than responses use: the next one is loaded while they run
        loaded = o.adapters + (o.adapters > 1)
        flags |= {"--enable-lora": True, "--max-loras": o.adapters, "--max-cpu-loras": loaded, "--max-lora-rank": slots}
        # vLLM would also prepare experts for adapters, for which it has no kernel on a CPU
        flags["--lora-target-modules"] = o.lora_modules or None
    if not o.lora_rank or o.takes_base:
        flags["--weight-transfer-config"] = json.dumps({"backend": "megagrpo"})
    return flags


def _device_flags(o: ServerOptions, gpu: bool) -> dict[str, object]:
    """Return the flags of sleep, of compilation and of batches on a GPU or a CPU."""
    flags: dict[str, object] = {"--enable-sleep-mode": o.sleep_mode}
    if gpu:
        flags |= {"--enforce-eager": o.enforce_eager, "--gpu-memory-utilization": o.gpu_memory_utilization}
        return flags | dict.fromkeys(SLEEP_FLAGS, o.sleep_mode)
    return flags | {
        "--enforce-eager": True,  # compiling on a CPU takes longer than it saves
        # responses to one prompt share only full blocks; vLLM's default of 128 exceeds most short prompts
        "--block-size": 32,
        "--max-num-batched-tokens": max(o.max_model_len, MAX_BATCHED_TOKENS),
        # A prompt that is split over two batches rewinds its seeded generator. torch cannot do that on a CPU, so the
        # engine would die.
        "--no-enable-chunked-prefill": True,
        "--no-enable-prefix-caching": o.recurrent,  # vLLM caches states only of prompts that it may split
    }


def server_environment(
    o: ServerOptions,
    devices: Sequence[str] | None,
    workers: int,
    *,
    loopback: bool,
    guarded: bool,
    node: ServerNode | None = None,
) -> dict[str, str]:
    """Return the environment of a server: what it inherits (`platform/process/environment.py`), and what the run sets.

    It runs on the GPUs `devices`; None runs vLLM for CPU, where `workers` share the host's cores. With `loopback` all
    ranks are on this host. With `guarded` its token comes from standard input. `node`: as in `server_command`.
    """
    env = inherited(ENVIRONMENT)
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env["VLLM_PLUGINS"] = "megagrpo"
    env["VLLM_PROCESS_NAME_PREFIX"] = "megagrpo-vllm"  # `ps | grep megagrpo` then shows EngineCore and workers too
    if loopback:
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK)
    if node is None:
        env.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # all workers of a server are on one host
        env["VLLM_HOST_IP"] = LOOPBACK_ADDRESS
    else:
        env["VLLM_HOST_IP"] = node.address  # where the other nodes reach this node's queues
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            env.setdefault(variable, _interface_of(node.address))
    if guarded and (node is None or node.index == 0):
        # a pipe, empty after one read; any process of this user can read an environment
        env[TOKEN_FILE_VARIABLE] = "/dev/stdin"
    if o.lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if devices is not None:
        if o.deterministic:
            env["VLLM_BATCH_INVARIANT"] = "1"
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    threads = o.omp_threads or max(1, len(os.sched_getaffinity(0)) // workers)
    tunables = env.pop("GLIBC_TUNABLES", MALLOC)
    env |= OPENMP
    return env | {
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(o.kv_cache_gb)),  # vLLM reads whole GiB
        # binding fails for tp > 1 on one NUMA node, and competes with the trainer for cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "TORCH_COMPILE_DISABLE": "1",  # without this the sampler runs a C++ compiler in the first request
        # the last one: glibc moves it, and a process's title fits only into the variables before it
        "GLIBC_TUNABLES": tunables,
    }


def _interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address. Raises ValueError if this host lacks it."""
    if address.startswith("127."):
        return LOOPBACK
    for name, ipv4 in interface_addresses().items():
        if ipv4 == address:
            return name
    raise ValueError(
        f"--head: {address} is not an IPv4 address of this host's network interfaces; name another address"
    )
