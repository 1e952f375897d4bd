"""Time of a step's own work at full size: reward calls, and the packing of samples into micro-batches.

    python benchmarks/scale.py --samples 2000 --group 8 --tokens 24000
    python benchmarks/scale.py --packing    # 1,000 to 100,000 samples of five distributions of lengths, 32 ranks

Rewards: groups of long responses through a worker process, with a built-in function.

`in process` is the function alone. `in a worker` is what a step waits for: a call for each whole group, its arguments
as JSON through a socket, and the function. `short texts` are the same calls with responses of one digit, which leaves
the costs of a call itself. CPU is that of the trainer's process, without the worker's.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from functools import partial

from megagrpo.config import RewardFunction, RewardsSection
from megagrpo.data.packing import PackingRules, assign, imbalance
from megagrpo.rewards.functions.text_rewards import exact_number
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.types import Prompt, Rollout

WORDS = "so we add the two sides and get 12 = 3 * 4, which is even; now take x = 7 and let us check that again:".split()


def response(tokens: int, number: int) -> str:
    """A text of about four characters a token, in lines of 20 words, that ends in `number`."""
    rng = random.Random(number)
    words = [rng.choice(WORDS) + ("\n" if i % 20 == 19 else "") for i in range(tokens * 4 // 4)]
    return f"<think>{' '.join(words)}</think>The answer is {number}."


def rollouts(samples: int, group: int, tokens: int) -> list[Rollout]:
    """Responses of prompts in groups. Few different texts: their scoring does not depend on it."""
    texts = [response(tokens, number) for number in range(4)] if tokens > 1 else ["0", "1", "2", "3"]
    ids, logprobs = tuple(range(100_000, 100_000 + tokens)), (0.0,) * tokens
    prompts = [Prompt(i, (1, 2), "What is it?", {"answer": str(i % 4)}) for i in range(samples // group)]
    return [
        Rollout(p, ids, logprobs, "stop", 0, texts[(i + j) % 4]) for i, p in enumerate(prompts) for j in range(group)
    ]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The seconds, and the CPU seconds of this process, that `work` takes."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def sample_lengths(kind: str, count: int, budget: int) -> list[int]:
    """Lengths of samples in tokens, at most the budget of a micro-batch."""
    rng = random.Random(0)
    draws: dict[str, Callable[[], float]] = {
        "uniform, 1/2 to 1": lambda: rng.uniform(budget / 2, budget),
        "uniform, 0 to 1/4": lambda: rng.uniform(1, budget / 4),
        "lognormal, median 1/8": lambda: rng.lognormvariate(math.log(budget / 8), 1),
        "lognormal, 15 % at 1": lambda: budget if rng.random() < 0.15 else rng.lognormvariate(math.log(budget / 8), 1),
        "all just above 1/3": lambda: budget / 3 + 1,
    }
    return [max(1, min(budget, int(draws[kind]()))) for _ in range(count)]


def packing(budget: int = 32768, ranks: int = 32, counts: tuple[int, ...] = (1_000, 16_000, 100_000)) -> None:
    """Print the seconds of `assign`, the fill of the micro-batches and the fullest rank over the mean."""
    print("| lengths over budget | " + " | ".join(f"s, {count:,}" for count in counts) + " | slope | fill | spread |")
    print("|---" * (len(counts) + 4) + "|")
    kinds = ("uniform, 1/2 to 1", "uniform, 0 to 1/4", "lognormal, median 1/8", "lognormal, 15 % at 1")
    for kind in (*kinds, "all just above 1/3"):
        taken, bins, lengths = [], [], []
        for count in counts:
            lengths = sample_lengths(kind, count, budget)
            begun = time.perf_counter()
            bins = assign(lengths, PackingRules(max_tokens=budget), ranks)
            taken.append(time.perf_counter() - begun)
        loads = [sum(lengths[i] for i in chosen) for chosen in bins]
        slope = math.log(taken[-1] / taken[0]) / math.log(counts[-1] / counts[0])
        spread = imbalance([sum(loads[rank::ranks]) for rank in range(ranks)])
        shown = " | ".join(f"{value:.3f}" for value in taken)
        print(f"| {kind} | {shown} | {slope:.2f} | {sum(loads) / len(loads) / budget:.4f} | {spread:.5f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--of", type=int, default=100_000, help="samples of a step, for the last column")
    parser.add_argument("--packing", action="store_true", help="only the packing")
    args = parser.parse_args()
    if args.packing:
        return packing()
    rows = {}
    for kind, tokens in ("", args.tokens), (", short texts", 1):
        asked = rollouts(args.samples, args.group, tokens)
        texts, golds = [r.text for r in asked], [r.prompt.columns["answer"] for r in asked]
        rows[f"in process{kind}"] = seconds(partial(exact_number, texts, golds))
        with RewardScorer(
            RewardsSection(functions=[RewardFunction(function="exact_number")], workers=1), args.tokens
        ) as scorer:
            scorer.score(asked[: args.group])
            rows[f"in a worker{kind}"] = seconds(partial(scorer.score, asked))
    print(
        f"| exact_number, {args.tokens} tokens, groups of {args.group} | ms/sample | CPU ms/sample | s for {args.of:,} "
        "samples |"
    )
    print("|---|---|---|---|")
    for name, (taken, used) in rows.items():
        wall, cpu = taken / args.samples, used / args.samples
        print(f"| {name} | {1000 * wall:.3f} | {1000 * cpu:.3f} | {wall * args.of:.1f} |")


if __name__ == "__main__":
    main()
