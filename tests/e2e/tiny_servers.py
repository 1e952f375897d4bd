"""Tiny random models and real vLLM servers on them: each test process starts them once and stops them at its end."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from megagrpo.config import ParallelSection
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.engine.servers.serving import known_model, served_flags
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import cut
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.bridge.load import load_hf
from tests.e2e import world
from tests.rank_fakes import OneRank

# The path on which servers, including restarted ones, find halting.py.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
SIZES = dict(
    vocab_size=1000,  # vLLM pads it, so a part of the embedding is loaded only when an update finishes
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.08,
    tie_word_embeddings=True,
)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[0]
) | dict(head_dim=32)
EVERYWHERE = {key: value for key, value in EXPERTS.items() if key not in ("norm_topk_prob", "mlp_only_layers")}
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128
) | dict(shared_expert_intermediate_size=64, layer_types=["linear_attention", "full_attention"])
GRANITE_H = dict(layer_types=["linear_attention", "full_attention"], num_local_experts=0, shared_intermediate_size=192)
GRANITE_H |= dict(mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16)
NEMOTRON = dict(layers_block_type=["mamba", "attention", "mlp"], head_dim=32, mamba_num_heads=8, mamba_head_dim=16)
NEMOTRON |= dict(n_groups=2, ssm_state_size=16, tie_word_embeddings=False)
# In bf16 vLLM and the trainer choose other experts for some of its tokens.
MANY_EXPERTS = SIZES | EXPERTS | dict(vocab_size=258, num_hidden_layers=4, num_experts=32, initializer_range=0.12)
# vLLM's latent attention on CPUs supports one size of latents: 512 and 64.
LATENT = dict(num_key_value_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32) | dict(
    tie_word_embeddings=False
)
LATENT |= dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, first_k_dense_replace=1, n_shared_experts=1
)
LATENT |= dict(n_group=4, topk_group=2)
LATENT["rope_parameters"] = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, mscale=0.9, mscale_all_dim=0.7
)
V2 = LATENT | dict(q_lora_rank=None, topk_method="group_limited_greedy")
V3 = LATENT | dict(q_lora_rank=48, scoring_func="sigmoid", topk_method="noaux_tc")
GEMMA = dict(head_dim=32, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
CAPS = dict(attn_logit_softcapping=5.0, final_logit_softcapping=4.0)
GPT_OSS = dict(
    tie_word_embeddings=False,
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    initializer_range=0.3,  # clamps some activations
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=4.0,
        original_max_position_embeddings=64,  # vLLM has angles for `factor` times as many positions
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    ),
)
CONFIGS: dict[str, tuple[str, dict]] = {  # the name of transformers' class, and its keywords beside SIZES
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "many_experts": ("Qwen3MoeConfig", MANY_EXPERTS | dict(eos_token_id=257, bos_token_id=None, pad_token_id=None)),
    "deepseek_v2": ("DeepseekV2Config", V2),
    "deepseek_v3": ("DeepseekV3Config", V3),
    "gemma2": ("Gemma2Config", GEMMA | CAPS),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gpt_oss": ("GptOssConfig", GPT_OSS),
    "qwen3_next": ("Qwen3NextConfig", EXPERTS | DELTA | dict(tie_word_embeddings=False)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", GRANITE_H),
    "nemotron_h": ("NemotronHConfig", NEMOTRON),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", EVERYWHERE | DELTA),
}
PROMPTS = [Prompt(i, tuple((7 * i + 3 * k) % 997 + 3 for k in range(4 + i)), "") for i in range(5)]
SAMPLINGS = [SamplingParams(0.0, 24), SamplingParams(1.0, 24)]
WORKERS_SHARE_MEMORY = torch.cpu._is_avx512_supported()
"""Two workers of a server communicate through shared memory. vLLM's build for CPUs without AVX-512 has gloo alone."""


@dataclass(frozen=True)
class Running:
    """A server, its client, and the folder with its initial weights."""

    folder: Path
    launcher: Launcher = field(repr=False)
    engine: VllmEngine = field(repr=False)


@functools.cache
def scratch() -> Path:
    """A folder that is removed with the process."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_servers_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def model_folder(kind: str, seed: int = 0) -> Path:
    """A Hugging Face folder with random float32 weights, including norms, biases and buffers."""
    import transformers

    folder = scratch() / f"{kind}{seed}"
    torch.manual_seed(seed)
    name, keys = CONFIGS[kind]
    config = getattr(transformers, name)(**SIZES | keys)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, param in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                param.copy_(1 + 0.1 * torch.randn_like(param))
            elif name.endswith(("bias", "sinks")):
                param.copy_(0.2 * torch.randn_like(param))
    model.save_pretrained(folder)
    return folder


@functools.cache
def tokenizer_of_threes():
    """A tokenizer whose tokens are three letters each. No letter occurs twice in the vocabulary."""
    import transformers

    names = ["".join(chr(first + i) for first in (0x4E00, 0x5E00, 0x6E00)) for i in range(SIZES["vocab_size"])]
    raw = RawTokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw)


@functools.cache
def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in a folder, by name."""
    return load_file(folder / "model.safetensors")


def launch(folder: Path, log_name: str, num_servers: int = 1, **options) -> Launcher:
    """Start servers on `folder`; tests can halt their workers (`halt`), or extend them by a class of their own."""
    workers = options.pop("workers", "halting.Halting")
    if not options.get("lora_rank"):
        options["extra_args"] = (*options.get("extra_args", ()), "--worker-extension-cls", workers)
    usual = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 64, "kv_cache_gb": 1, "omp_threads": 1}
    usual["family_flags"] = dict(served_flags(known_model(folder)))
    usual["recurrent"] = load_hf_config(folder).recurrence is not None
    settings = ServerOptions(str(folder), **usual | options)
    launcher = Launcher(settings, scratch() / log_name, num_servers=num_servers)
    launcher.start()
    return launcher


def connect(launcher: Launcher, folder: Path, **options) -> Running:
    """The client of a server, once the server responds."""
    launcher.wait()
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    return Running(folder, launcher, VllmEngine(launcher.urls, decode, max_num_seqs=64, logs=launcher.logs, **options))


def halt(url: str, worker: int, moment: str, passes: int = 0) -> int:
    """Stop a worker at a point of the next weight update, like `halting.Halting.halt`; return its process id."""
    body = {"method": "halt", "args": [worker, moment, passes]}
    return int(httpx.post(f"{url}/collective_rpc", json=body, timeout=10).json()["results"][worker])


def is_halted(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@dataclass(frozen=True)
class Fresh:
    """The weights that tests push: their folder, and the responses (`sampled`) of a server that loaded it."""

    folder: Path
    sampled: list[tuple] = field(repr=False)


@functools.cache
def tied_llamas() -> tuple[Running, Fresh]:
    """A server to sync, and what it must equal afterwards: the responses of its first start, from other weights than it
    loads in a restart. It has a tokenizer (`tokenizer_of_threes`)."""
    folder, other = model_folder("llama", 0), model_folder("llama", 1)
    loaded = Path(shutil.copytree(other, scratch() / "loaded"))
    tokenizer_of_threes().save_pretrained(loaded)
    synced = connect(launch(loaded, "llama", finds_text=True), folder)
    fresh = Fresh(other, sampled(synced.engine))
    shutil.copy(folder / "model.safetensors", loaded / "new")
    (loaded / "new").replace(loaded / "model.safetensors")
    push(synced.engine, folder)
    return synced, fresh


def shards(folder: Path, parts: int = 1, part: int = 0) -> Iterator[tuple[str, torch.Tensor, list[Block]]]:
    """The shard of one of `parts` ranks: columns of o_proj and down_proj, rows of the rest, norms whole."""
    for name, full in weights(folder).items():
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        pieces = parts if full.dim() == 2 else 1
        n = full.shape[dim] // pieces
        start = n * (part if pieces > 1 else 0)
        held = full.narrow(dim, start, n).contiguous()
        shape, grid = tuple(full.shape), tuple(held.shape)
        yield name, held, [Block(name, shape, cut(shape, dim, start, start + n), grid, axis=0, at=0, count=grid[0])]


def push(engine: VllmEngine, folder: Path) -> None:
    """Push the weights of `folder` from one rank."""
    with WeightSync(engine, OneRank(), "float32") as sync:
        sync.push(shards(folder), engine.weight_version + 1)


def routes_of(kind: str) -> RouteShape:
    """The shape of the routes of a model of this kind."""
    hf_config = load_hf_config(model_folder(kind))
    experts = hf_config.mixture
    return RouteShape(tuple(sorted(experts.blocks)), hf_config.num_layers, experts.count, experts.per_token)


@functools.cache
def mixture() -> Running:
    """A server on a mixture of experts, with the tokenizer of `world.py`, that returns routes. Each test that pushes
    other weights to it pushes those of its folder again before it ends."""
    folder = model_folder("many_experts", 0)
    for file in (world.folder() / "model").iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder)
    launcher = launch(folder, "mixture", returns_routes=True, finds_text=True)
    return connect(launcher, folder, routes=routes_of("many_experts"))


def push_from_megatron(parallel: dict, engine, folder: Path, out: Path, version: int) -> int:
    """Load `folder` into Megatron shards, export them to `out`, and push them to `engine`; return the bytes that the
    server read."""
    layout = init_layout(ParallelSection(**parallel))
    hf_config = load_hf_config(folder)
    chunks = build_model(hf_config, layout, ModelOptions(dtype=torch.float32))
    load_hf(chunks, hf_config, folder, layout)
    save_hf(chunks, hf_config, layout, out, folder)
    with WeightSync(engine if layout.world_rank == 0 else None, layout, "float32") as sync:
        report = sync.push(blocks(chunks, hf_config, layout), version)
    layout.close()
    return report.bytes_read


def sampled(engine: VllmEngine) -> list[tuple]:
    """Tokens and log-probs of greedy and of random responses; the greedy ones, one for each prompt, come first."""
    groups = [
        group for n, sampling in enumerate(SAMPLINGS, 1) for group in engine.generate(PROMPTS, n, sampling, seed=4)
    ]
    return [(rollout.response_ids.tolist(), rollout.rollout_logprobs.tolist()) for group in groups for rollout in group]


def greedy(engine: VllmEngine, max_tokens: int = 24) -> list[tuple]:
    """Tokens and log-probs of the engine's greedy responses to PROMPTS."""
    groups = engine.generate(PROMPTS, 1, SamplingParams(0.0, max_tokens), seed=0)
    return [(group[0].response_ids.tolist(), group[0].rollout_logprobs.tolist()) for group in groups]


@functools.cache
def oracle(folder: Path) -> torch.nn.Module:
    """transformers' model in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def naive_logits(folder: Path, prompt: Prompt, response: Sequence[int]) -> torch.Tensor:
    """transformers' logits for each token of a response, [Lr, V]."""
    ids = torch.tensor([[*prompt.token_ids, *response]])
    return oracle(folder)(ids).logits[0, len(prompt.token_ids) - 1 : -1].float()


def naive_logprobs(folder: Path, prompt: Prompt, response: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a response by the full softmax over transformers' logits, [Lr]."""
    logits = naive_logits(folder, prompt, response)
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def below(pid: int) -> list[int]:
    """Living processes below `pid`."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [descendant for child in children for descendant in below(child)]
