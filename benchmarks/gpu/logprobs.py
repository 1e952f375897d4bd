"""Log-probs from an LM head on a GPU: the head's product alone, the chunked path and the fused kernels, at the shapes
of published models.

    python -m benchmarks.gpu.logprobs            # a table per shape, the chip's measured ceilings above them
    python -m benchmarks.gpu.logprobs --dry-run  # what it would run: products, FLOPs and bytes; no GPU needed
    python -m benchmarks.gpu.logprobs --tune     # the fused kernel's forward pass in other tiles

Every contender gets hidden states [T, H], a head [V, H], labels [T] and the gradients of the log-probs, and returns the
gradients of hidden states and head; contenders named "pass" return only log-probs and entropy. Columns: milliseconds
(median); time over the head's product alone, or over three times that product with gradients; TFLOP/s of the required
products (one, or three); their share of the chip's measured bf16 ceiling; peak bytes above the inputs. With FP8 the
head's product alone is in FP8 for passes, and one in FP8 plus two in bf16 with gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import common
from megagrpo.platform import device
from megagrpo.policy.lm_head import fused_logprobs
from megagrpo.policy.lm_head.fp8 import FP8_BLOCK, in_fp8
from megagrpo.policy.lm_head.task import HeadTask
from megagrpo.policy.lm_head.vocab_logprobs import vocab_logprobs

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """An LM head, and the tokens of a micro-batch."""

    name: str
    vocab: int
    hidden: int
    tokens: int

    @property
    def flops(self) -> float:
        """FLOPs of one product with the head."""
        return 2.0 * self.tokens * self.vocab * self.hidden


SHAPES = {
    "qwen2.5-0.5b": Shape("Qwen2.5-0.5B", 151_936, 896, 16_384),
    "qwen2.5-7b": Shape("Qwen2.5-7B, Qwen3-8B", 151_936, 3_584, 16_384),
    "llama3-8b": Shape("Llama-3-8B", 128_256, 4_096, 16_384),
}


@dataclass(frozen=True)
class Contender:
    """A method for the log-probs; `products` is its number of products with the head, with gradients or without."""

    name: str
    products: int
    gradients: bool = True
    fused: bool = False
    early: bool = True
    fp8: str | None = None

    def run(self, inputs: Inputs, chunk: int) -> object:
        options = dict(fused=self.fused, fp8=self.fp8, chunk=chunk)
        if not self.gradients:
            with torch.no_grad():
                return vocab_logprobs(inputs.hidden, inputs.weight, HeadTask(inputs.labels, **options))
        early_gradients = (lambda rows, logprobs: (inputs.upstream[rows],)) if self.early else None
        logprobs, _ = vocab_logprobs(
            inputs.hidden, inputs.weight, HeadTask(inputs.labels, upstream=early_gradients, **options)
        )
        return torch.autograd.grad(logprobs, (inputs.hidden, inputs.weight), inputs.upstream)


CONTENDERS = (
    Contender("chunked, pass", 1, gradients=False),
    Contender("fused, pass", 1, gradients=False, fused=True),
    Contender("fused FP8 tensorwise, pass", 1, gradients=False, fused=True, fp8="tensorwise"),
    Contender("fused FP8 blockwise, pass", 1, gradients=False, fused=True, fp8="blockwise"),
    Contender("chunked", 3),
    Contender("fused", 3, fused=True),
    Contender("fused, late gradients", 4, fused=True, early=False),
    Contender("fused FP8 tensorwise", 3, fused=True, fp8="tensorwise"),
    Contender("fused FP8 blockwise", 3, fused=True, fp8="blockwise"),
)


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, shape: Shape) -> Inputs:
        torch.manual_seed(0)
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        hidden, weight = make(shape.tokens, shape.hidden), make(shape.vocab, shape.hidden).mul_(2 * shape.hidden**-0.5)
        labels = torch.randint(0, shape.vocab, (shape.tokens,), device="cuda")
        return cls(hidden.requires_grad_(), weight.requires_grad_(), labels, torch.randn(shape.tokens, device="cuda"))


def head_alone(inputs: Inputs, fp8: bool) -> Callable[[], None]:
    """The head's product, 4096 tokens at a time into the same memory, which every method needs."""
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    out = torch.empty(4096, weight.shape[0], device="cuda", dtype=torch.bfloat16)
    (hidden8, h), (weight8, w) = (
        (in_fp8(t, "tensorwise", FP8_BLOCK) for t in (hidden, weight)) if fp8 else ((hidden, None), (weight, None))
    )

    def run() -> None:
        for rows in range(0, hidden.shape[0], 4096):
            part = hidden8[rows : rows + 4096]
            if fp8:
                torch._scaled_mm(part, weight8.t(), h[0], w[0], out_dtype=torch.bfloat16, out=out[: part.shape[0]])
            else:
                torch.mm(part, weight8.t(), out=out[: part.shape[0]])

    return run


def measure(shape: Shape, chunk: int, ceilings: common.Ceilings) -> None:
    inputs = Inputs.of(shape)
    alone = {False: common.seconds(head_alone(inputs, fp8=False))}
    if ceilings.fp8_tflops:
        alone[True] = common.seconds(head_alone(inputs, fp8=True))
    rows = [["", "ms", "/ products", "TFLOP/s", "of bf16's", "peak GiB"]]
    for fp8, time in alone.items():
        tflops = shape.flops / time / 1e12
        rows.append(
            [
                f"head alone, {'FP8' if fp8 else 'bf16'}",
                f"{time * 1e3:.2f}",
                "1.00",
                f"{tflops:.0f}",
                share(tflops, ceilings),
                "",
            ]
        )
    for contender in CONTENDERS:
        if contender.fp8 and not ceilings.fp8_tflops:
            continue
        run = partial(contender.run, inputs, chunk)
        time, needed = common.seconds(run), 3 if contender.gradients else 1
        least = alone[contender.fp8 is not None] + (needed - 1) * alone[False]
        tflops = needed * shape.flops / time / 1e12
        peak = f"{common.peak_bytes(run) / GIB:.2f}"
        rows.append(
            [contender.name, f"{time * 1e3:.2f}", f"{time / least:.2f}", f"{tflops:.0f}", share(tflops, ceilings), peak]
        )
    common.show(rows)


def share(tflops: float, ceilings: common.Ceilings) -> str:
    return f"{tflops / ceilings.bf16_tflops:.0%}"


def plan(shape: Shape, chunk: int) -> None:
    """The work of `measure`: products, TFLOP and GiB in addition to the inputs, by arithmetic."""
    rows = [["", "products", "TFLOP", "GiB of logits or scratch", "GiB of gradients"]]
    for contender in CONTENDERS:
        gradients = shape.vocab * shape.hidden * (4 + 2) + shape.tokens * shape.hidden * 2 if contender.gradients else 0
        sizes = (logits_bytes(contender, shape, chunk), gradients)
        flops = f"{contender.products * shape.flops / 1e12:.1f}"
        rows.append([contender.name, str(contender.products), flops, *(f"{size / GIB:.2f}" for size in sizes)])
    common.show(rows)
    inputs = (shape.vocab + shape.tokens) * shape.hidden * 2 / GIB
    print(
        f"inputs {inputs:.2f} GiB; logits of all tokens in float32 would be {shape.tokens * shape.vocab * 4 / GIB:.1f} "
        "GiB"
    )


def logits_bytes(contender: Contender, shape: Shape, chunk: int) -> int:
    """Memory that grows with tokens times vocabulary: the chunk's logits in float32 and in the product's bf16; the
    fused kernels' scratch, and their statistics of all tokens."""
    if not contender.fused:
        return min(chunk, shape.tokens) * shape.vocab * (4 + 2)
    tiles = fused_logprobs.FP8_TILES if contender.fp8 else fused_logprobs.TILES
    statistics = shape.tokens * fused_logprobs.MAX_SPLITS * 16
    if not contender.gradients:
        return statistics
    tokens = min(shape.tokens, fused_logprobs.chunk_tokens(shape.vocab, 2, tiles))
    return tokens * (shape.vocab * 2 + -(-shape.vocab // tiles.vocab) * 4) + statistics


def tune(shape: Shape) -> None:
    """Milliseconds of the fused pass with other tile sizes than the default."""
    inputs, chosen = Inputs.of(shape), fused_logprobs.TILES
    contender = next(c for c in CONTENDERS if c.fused and not c.gradients and c.fp8 is None)
    rows = [["tokens x vocabulary x features, warps, stages", "ms", "TFLOP/s"]]
    for tiles in (chosen, *(replace(chosen, **change) for change in CHANGES)):
        fused_logprobs.TILES = tiles
        time = common.seconds(partial(contender.run, inputs, 0))
        name = f"{tiles.tokens} x {tiles.vocab} x {tiles.hidden}, {tiles.warps}, {tiles.stages}"
        rows.append([name, f"{time * 1e3:.2f}", f"{shape.flops / time / 1e12:.0f}"])
    fused_logprobs.TILES = chosen
    common.show(rows)


CHANGES = (
    dict(stages=3),
    dict(vocab=128),
    dict(vocab=128, warps=4, stages=3),
    dict(tokens=256, vocab=128),
    dict(tokens=64, warps=4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, help="of a micro-batch, instead of 16384")
    parser.add_argument("--chunk", type=int, default=2048, help="train.logprob_chunk of the chunked path")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, with its FLOPs and bytes")
    parser.add_argument("--tune", action="store_true", help="time the fused pass in other tiles")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        common.need_a_gpu()
        device.select_local_device()
        ceilings = common.measure_ceilings()
        print(ceilings)
    for key in args.shapes:
        shape = SHAPES[key] if args.tokens is None else replace(SHAPES[key], tokens=args.tokens)
        print(f"\n{shape.name}: T={shape.tokens} H={shape.hidden} V={shape.vocab}")
        if args.dry_run:
            plan(shape, args.chunk)
        elif args.tune:
            tune(shape)
        else:
            measure(shape, args.chunk, ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
