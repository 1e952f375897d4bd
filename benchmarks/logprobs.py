"""Log-probs of T labels from an LM head, forward and backward: `vocab_logprobs` beside three other ways, on one device.

    python benchmarks/logprobs.py --hidden 576 --dtype fp32

Every contender gets hidden states [T, H], a head [V, H], labels [T] and the gradient of the loss in each log-prob, and
gives the gradients of hidden states and head:

- megagrpo: `vocab_logprobs`, which also returns the entropy; only the logits of `chunk` tokens exist at a time. The
  gradients of the log-probs are computed early, as in a train step for all its losses, and checked in the backward
  pass.
- megagrpo, late gradients: the same without early gradients; the backward pass computes the logits again, which takes
  four products of T x V x H instead of three.
- plain: log_softmax over the whole [T, V] logits in float32, and autograd.
- liger-style: the method of transformers with liger-kernel's fused linear losses, in plain PyTorch: `--liger-chunk`
  tokens at a time, loss and gradients of a chunk together, gradients of the head summed up. This requires a loss known
  token by token inside the kernel; so it gets the gradients of the log-probs in advance.
- megatron: the logits times Megatron's `vocab_parallel_cross_entropy`, of a tensor-parallel group of one.

Columns: median wall and CPU seconds of repetitions that alternate in one process; peak memory above the inputs, of a
process that runs one contender once; the largest difference of a gradient from the plain float32 one, over the largest
gradient. With bf16 all inputs are bf16, and the difference is from float32 arithmetic on the same inputs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from megagrpo.platform.process.variables import OPENMP

os.environ |= OPENMP | os.environ  # read once, when torch is imported

import torch
from torch import Tensor

from megagrpo.config import ParallelSection
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs

Gradients = tuple[Tensor, ...]  # of hidden states and of the head's weight
Contender = Callable[[Tensor, Tensor, Tensor, Tensor], Gradients]


def megagrpo(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor, *, chunk: int, early: bool) -> Gradients:
    early_gradients = (lambda rows, logprobs: (upstream[rows],)) if early else None
    logprobs, _ = vocab_logprobs(hidden, weight, HeadTask(labels, chunk=chunk, upstream=early_gradients))
    return torch.autograd.grad(logprobs, (hidden, weight), upstream)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Gradients:
    return torch.autograd.grad(plain_logprobs(hidden, weight, labels), (hidden, weight), upstream)


def plain_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return (hidden @ weight.t()).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]


def liger_style(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor, *, chunk: int) -> Gradients:
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows].detach().requires_grad_()
        logprobs = plain_logprobs(part, weight, labels[rows])
        grad_hidden[rows], grad = torch.autograd.grad(logprobs, (part, weight), upstream[rows])
        grad_weight += grad
    return grad_hidden, grad_weight.to(weight.dtype)


def megatron(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> Gradients:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # after megagrpo, which prepares the device

    logits = (hidden @ weight.t())[:, None]
    losses = vocab_parallel_cross_entropy(logits, labels[:, None])
    return torch.autograd.grad(losses[:, 0], (hidden, weight), -upstream)


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    return {
        **{f"megagrpo, chunk {chunk}": partial(megagrpo, chunk=chunk, early=True) for chunk in args.chunks},
        f"megagrpo, late gradients, chunk {args.chunks[0]}": partial(megagrpo, chunk=args.chunks[0], early=False),
        "plain": plain,
        f"liger-style, chunk {args.liger_chunk}": partial(liger_style, chunk=args.liger_chunk),
        "megatron": megatron,
    }


def inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype, place = device.resolve_precision(args.dtype), device.device()
    hidden = torch.randn(args.tokens, args.hidden, device=place, dtype=dtype)
    # logits of standard deviation 2
    weight = (torch.randn(args.vocab, args.hidden, device=place) * 2 * args.hidden**-0.5).to(dtype)
    labels = torch.randint(0, args.vocab, (args.tokens,), device=place)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, torch.randn(args.tokens, device=place)


def wait() -> None:
    if device.has_gpu():
        torch.cuda.synchronize()


def measure_time(args: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    """(median wall seconds, median CPU seconds, largest relative gradient difference) of each contender; the order
    rotates."""
    given = inputs(args)
    exact = [
        g.float() for g in plain(*(t.detach().float().requires_grad_() if t.is_floating_point() else t for t in given))
    ]
    names = list(contenders(args).items())
    times: dict[str, list[tuple[float, float]]] = {}
    differences: dict[str, float] = {}
    for repeat in range(args.repeats):
        for name, contender in names[repeat % len(names) :] + names[: repeat % len(names)]:
            wall, cpu = time.perf_counter(), time.process_time()
            found = contender(*given)
            wait()
            times.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))
            differences[name] = max(difference(f, e) for f, e in zip(found, exact, strict=True))
            del found
    return {name: (*map(statistics.median, zip(*times[name], strict=True)), differences[name]) for name, _ in names}


def difference(found: Tensor, exact: Tensor) -> float:
    """Largest absolute difference over the largest absolute value."""
    return ((found - exact).abs().max() / exact.abs().max()).item()


def measure_memory(args: argparse.Namespace, name: str) -> float:
    """GiB above the inputs at the peak of one run of a contender, in this process."""
    given = inputs(args)
    contender = contenders(args)[name]
    contender(*(t[:8] if t is not given[1] else t for t in given))  # libraries allocate their own memory on first use
    if device.has_gpu():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender(*given)
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak (man proc)
    before = resident("VmRSS")
    contender(*given)
    return (resident("VmHWM") - before) / 2**20


def resident(name: str) -> int:
    """KiB of resident memory: VmRSS is now, VmHWM the peak."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[256], help="train.logprob_chunk: tokens whose logits exist at a time"
    )
    parser.add_argument("--liger-chunk", type=int, default=512, help="tokens of a chunk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-of", metavar="NAME", help="measure one contender's memory and nothing else")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    init_layout(ParallelSection())
    device.prepare_precision(device.resolve_precision(args.dtype))
    if args.memory_of:
        print(measure_memory(args, args.memory_of))
        return
    command = [sys.executable, *sys.argv]
    memory = {
        name: float(subprocess.run([*command, "--memory-of", name], check=True, capture_output=True, text=True).stdout)
        for name in contenders(args)
    }
    print(
        f"{args.dtype}, T={args.tokens} H={args.hidden} V={args.vocab}, {args.threads} threads, median of "
        f"{args.repeats}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'contender':34} {'s':>8} {'CPU s':>8} {'peak GiB':>9} {'gradient difference':>20}")
    for name, (wall, cpu, worst) in measure_time(args).items():
        print(f"{name:34} {wall:8.2f} {cpu:8.2f} {memory[name]:9.2f} {worst:20.1e}", flush=True)


if __name__ == "__main__":
    main()
