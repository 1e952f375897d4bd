"""One optimizer step against its tokens and against the size of the model: seconds, seconds of its matrix products
alone, memory.

    python benchmarks/step_cost.py --threads 2 --picture docs/images/step_cost.svg

Each point is a separate process: it takes steps of `MegatronPolicy` on random weights, with samples of 40 + 24 tokens
in micro-batches of at most 1,024 tokens, and times one step after three short ones. The limit is the time of the step's
products at the same shapes, each timed alone on warm memory. The limit excludes attention, about 2 % of the work at 64
tokens a sample. Memory is the largest resident memory of the process. AdamW's moments of the 1.5B model are FP8 between
steps, so that it fits 24 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # run by its path, this file sees only its own folder

SAMPLE, MICRO_BATCH, RESPONSE, CHUNK = 64, 1024, 24, 256  # tokens
WARM_UP = 3  # steps of one micro-batch before the measured step
SIZES = {  # hidden, layers, heads, KV heads, FFN, vocabulary; the head is the embedding
    "135M": (576, 30, 9, 3, 1536, 49152),
    "360M": (960, 32, 15, 5, 2560, 49152),
    "0.5B": (896, 24, 14, 2, 4864, 151936),
    "1.5B": (1536, 28, 12, 2, 8960, 151936),
}


STATES = {"1.5B": "fp8"}  # dtype of AdamW's moments where not fp32


class Cost(NamedTuple):
    """One point: seconds of a step and of its products alone, its tokens, and GiB of resident memory at the peak."""

    size: str
    tokens: int
    seconds: float
    limit: float
    gib: float


def hf_config(size: str) -> dict[str, object]:
    """Return config.json of a model of this size, in Llama's form."""
    hidden, layers, heads, kv_heads, ffn, vocabulary = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
    }


def seconds_of_products(size: str, tokens: int, dtype: object) -> float:
    """Return the seconds of all matrix products of a step: three per weight matrix, forward and the two gradients."""
    import torch

    hidden, layers, heads, kv_heads, ffn, vocabulary = SIZES[size]
    qkv = hidden * (heads + 2 * kv_heads) // heads
    rows, passes = min(tokens, MICRO_BATCH), max(1, tokens // MICRO_BATCH)
    answered = rows * RESPONSE // SAMPLE  # logits are computed for response tokens only
    chunks = max(1, round(answered / CHUNK))
    shapes = {
        (rows, hidden, qkv): layers,
        (rows, hidden, hidden): layers,
        (rows, hidden, 2 * ffn): layers,
        (rows, ffn, hidden): layers,
    }
    total = 0.0
    for (n, k, m), count in [*shapes.items(), ((answered // chunks, hidden, vocabulary), chunks)]:
        x, weight, grad = (torch.randn(*shape, dtype=dtype) for shape in ((n, k), (m, k), (n, m)))  # type: ignore[call-overload]
        outputs = [torch.empty(*shape, dtype=dtype) for shape in ((n, m), (n, k), (m, k))]  # type: ignore[call-overload]
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            torch.mm(x, weight.t(), out=outputs[0])
            torch.mm(grad, weight, out=outputs[1])
            torch.mm(grad.t(), x, out=outputs[2])
            times.append(time.perf_counter() - begun)
        total += count * sorted(times[1:])[1]  # the median of three
    return passes * total


def measure(size: str, tokens: int, dtype: str, threads: int) -> Cost:
    """Measure one point in this process."""
    import torch

    from benchmarks.train_step import Megagrpo, make_samples
    from megagrpo.platform import device

    device.install()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    limit = seconds_of_products(size, tokens, device.resolve_precision(dtype))
    policy = Megagrpo(dtype, MICRO_BATCH, hf_config(size), optimizer_state_dtype=STATES.get(size, "fp32"))
    samples = make_samples(max(1, tokens // SAMPLE), SAMPLE - RESPONSE, RESPONSE, "equal")
    for _ in range(WARM_UP):  # the memory of the process grows until the third step
        policy.step(samples[: MICRO_BATCH // SAMPLE])
    begun = time.perf_counter()
    policy.step(samples)
    return Cost(
        size, tokens, time.perf_counter() - begun, limit, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )


def draw(by_tokens: list[Cost], by_size: list[Cost], title: str, path: Path) -> None:
    """Draw seconds and memory against tokens and against model size as an SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(9.5, 6.2), layout="constrained")
    for column, costs in enumerate((by_tokens, by_size)):
        places = [cost.tokens for cost in costs] if column == 0 else list(range(len(costs)))
        labels = [f"{cost.tokens // 1024}k" for cost in costs] if column == 0 else [cost.size for cost in costs]
        seconds, memory = panels[0][column], panels[1][column]
        seconds.plot(places, [cost.seconds for cost in costs], "o-", color="#4051b5", label="step")
        seconds.plot(places, [cost.limit for cost in costs], "o--", color="#d1242f", label="its matrix products alone")
        seconds.set(yscale="log", ylabel="seconds")
        seconds.legend(frameon=False)
        memory.plot(places, [cost.gib for cost in costs], "o-", color="#1a7f37")
        memory.set(ylim=(0, 1.15 * max(cost.gib for cost in costs)), ylabel="peak memory, GiB")
        first = costs[0]
        what = f"tokens of a step ({first.size} parameters)" if column == 0 else f"parameters ({first.tokens:,} tokens)"
        for panel in (seconds, memory):
            if column == 0:
                panel.set_xscale("log", base=2)
            panel.set_xticks(places, labels)
            panel.minorticks_off()
            panel.set_xlabel(what)
            panel.grid(color="#d0d7de", linewidth=0.5)
            panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure all points, print them as a table, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1024, 4096, 16384, 65536], help="tokens of a step of the 135M model"
    )
    parser.add_argument(
        "--sizes", nargs="*", choices=SIZES, default=list(SIZES), help="models of a step of 1,024 tokens"
    )
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("--point", nargs=2, metavar=("SIZE", "TOKENS"), help="measure one point and print it as JSON")
    args = parser.parse_args()
    if args.point:
        size, tokens = args.point
        print(json.dumps(measure(size, int(tokens), args.dtype, args.threads)))
        return

    def point(size: str, tokens: int) -> Cost:
        from megagrpo.platform.process.variables import OPENMP

        command = [
            sys.executable,
            __file__,
            "--dtype",
            args.dtype,
            "--threads",
            str(args.threads),
            "--point",
            size,
            str(tokens),
        ]
        threads = OPENMP | {"OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, env=os.environ | threads, stdout=subprocess.PIPE, text=True, check=True)
        cost = Cost(*json.loads(done.stdout.splitlines()[-1]))
        share = cost.limit / cost.seconds
        print(
            f"| {size} | {tokens:,} | {cost.seconds:.2f} | {cost.limit:.2f} | {share:.0%} | {cost.gib:.2f} |",
            flush=True,
        )
        return cost

    print(f"{args.dtype}, {args.threads} threads, load {os.getloadavg()[0]:.1f}\n")
    print("| model | tokens | s/step | products alone, s | share | peak GiB |\n|---|---|---|---|---|---|")
    by_tokens = [point("135M", tokens) for tokens in args.tokens]
    by_size = [point(size, MICRO_BATCH) for size in args.sizes]
    if args.picture and by_tokens and by_size:
        draw(by_tokens, by_size, f"One optimizer step, {args.dtype}, {args.threads} CPU threads", args.picture)


if __name__ == "__main__":
    main()
