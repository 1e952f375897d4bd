"""Seconds, FLOP/s and memory of the policy's train step and of its log-prob pass on one GPU, in bf16 and in FP8, beside
the plan.

    python -m benchmarks.gpu.train_step                                  # all models, in bf16 and in FP8
    python -m benchmarks.gpu.train_step --models 7b --recipes none blockwise train.fused_logprobs=true
    python -m benchmarks.gpu.train_step --dry-run

Random weights in the shapes of Qwen2.5-0.5B, -1.5B, -7B and Qwen3-30B-A3B, packed samples of mixed lengths with prompts
shared by groups. A model that does not fit with optimizer and activations gets as many layers as `megagrpo plan` fits,
because its widths matter. `--layers 28 train.optimizer_state_dtype=fp8 train.max_tokens_per_micro_batch=6144` is all of
7B on 141 GB.

- tokens/s: of all samples, prompts included, padding not.
- TFLOP/s: model FLOPs (`planner/costs/flops.py`: forward and two forwards' worth backward, LM head for response
  tokens alone, nothing recomputed, a shared prompt once per response) per second. MFU: their share of the data sheet's
  bf16 peak, also with FP8; of GEMM: of a large bf16 product as measured here.
- predicted: `megagrpo plan --gpu` for the same step, in seconds and GiB. The peak is torch's, without the CUDA context.

The log-prob pass is forward only, over the same batch.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.setting import LARGE, SMALL, TINY, Table, begin, parse, parser, run_config, shape, wait, write_shape
from megagrpo.config import ConfigError, RunConfig
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.planner.costs.flops import attention_flops, model_flops, token_flops
from megagrpo.planner.costs.gpu_specs import Gpu
from megagrpo.planner.costs.planned_memory import trainer_memory
from megagrpo.planner.costs.shapes import num_parameters
from megagrpo.planner.costs.workload import Lengths
from megagrpo.planner.times.step_times import step_times

if TYPE_CHECKING:
    from benchmarks.gpu.common import Ceilings

# share of the memory for the planned peak: workspaces, fragments and FP8's copies of weights need the rest
USABLE = 0.8
WITHOUT_GPU_GIB = 8.0  # limit for a model when testing the script without a GPU
TARGETS = "targets on one H200: MFU of train >= 50% in bf16 at 7b, of log-probs >= 60%, FP8 >= 1.3 x of bf16"
KEPT = "_kept"  # after a recipe: with model.fp8_param
RECIPES = (
    "none",
    "tensorwise",
    "blockwise",
    "blockwise_kept",
    "tensorwise_kept",
    "mxfp8",
)  # the last one needs a Blackwell chip
Sizes = Sequence[tuple[int, int]]  # (prompt, response) tokens of each sample


@dataclass(frozen=True)
class Case:
    """A model, its number of trained layers, the run, and the lengths of its samples."""

    name: str
    model: HfConfig
    config: RunConfig
    sizes: Sizes

    @property
    def tokens(self) -> int:
        return sum(prompt + response for prompt, response in self.sizes)

    @property
    def flops(self) -> float:
        """FLOPs of one train step."""
        return sum(model_flops(self.model, *size) for size in self.sizes)

    def predicted(self, gpu: Gpu) -> tuple[float, float, float]:
        """(seconds of the train step, of the log-prob pass, GiB at the peak)."""
        count, longest = len(self.sizes), self.config.rollout.max_completion_length
        prompts, responses = (sum(side) / count for side in zip(*self.sizes, strict=True))
        # the plan then computes log-probs first
        twice = self.config.algorithm.model_copy(update=dict(num_iterations=2))
        lengths = Lengths(prompts, responses, longest)
        seconds = step_times(self.config.model_copy(update=dict(algorithm=twice)), self.model, 1, gpu, lengths).seconds
        return seconds["train"] / 2, seconds["logprobs"], planned_gib(self.config, self.model)


@dataclass(frozen=True)
class Measured:
    """Medians in seconds, and the peak in GiB."""

    train: float
    logprobs: float
    peak_gib: float
    micro_batches: int


def planned_gib(config: RunConfig, model: HfConfig) -> float:
    """Planned memory at the peak of a train step."""
    return sum(trainer_memory(config, model, dp=1)["train"].values())


def memory_here() -> float:
    """GiB of this GPU, by CUDA's count."""
    from megagrpo.platform import device

    return device.gpu_memory_gb() or WITHOUT_GPU_GIB


def make_case(name: str, layers: int | None, gib: float, folder: Path, overrides: Sequence[str]) -> Case:
    """Make a case; with `layers` None it has all layers, or as many as fit."""
    whole, path = shape(name)["num_hidden_layers"], write_shape(shape(name, layers), folder / name)
    config = run_config(path, *overrides)
    if layers is None:
        tried = range(whole, 1, -1)
        layers = next((n for n in tried if planned_gib(config, parse_hf_config(shape(name, n))) <= USABLE * gib), 1)
        write_shape(shape(name, layers), path)
    return Case(name, parse_hf_config(shape(name, layers)), config, sizes_of(config))


def sizes_of(config: RunConfig) -> Sizes:
    """Prompts of half to all of the maximum, and responses of a quarter to all of it; each group has one prompt."""
    r, numbers = config.rollout, random.Random(0)
    found = []
    for _ in range(r.prompts_per_step):
        prompt = numbers.randint(r.max_prompt_length // 2, r.max_prompt_length)
        responses = [
            numbers.randint(r.max_completion_length // 4, r.max_completion_length) for _ in range(r.num_generations)
        ]
        found += [(prompt, response) for response in responses]
    return found


def samples_of(case: Case):
    """Samples of random tokens with these lengths, and advantages that add up to 0 in each pair."""
    import torch

    from megagrpo.train_types import TrainSample

    torch.manual_seed(0)
    samples, prompt_ids = [], torch.empty(0)
    for index, (prompt, response) in enumerate(case.sizes):
        if index % case.config.rollout.num_generations == 0:
            prompt_ids = torch.randint(0, case.model.vocab_size, (prompt,))
        ids = torch.cat([prompt_ids, torch.randint(0, case.model.vocab_size, (response,))])
        mask = torch.arange(ids.numel()) >= prompt
        samples.append(TrainSample(ids, mask, torch.where(mask, -12.0, 0.0), 1.0 - 2.0 * (index % 2), index=index))
    return samples


def measure(case: Case, steps: int, warm_up: int = 2) -> Measured:
    """A context manager: a policy of that model, deleted at the end."""
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.algorithms.reductions import denominator
    from megagrpo.data.packing.sample_packing import pack, packing_rules
    from megagrpo.platform import device
    from megagrpo.platform.parallel.layout import init_layout
    from megagrpo.policy.megatron_policy import MegatronPolicy

    config, layout = case.config, init_layout(case.config.parallel, case.config.run.seed)
    _forget_peak()
    try:
        policy = MegatronPolicy(config, layout, case.model)
        batch = pack(samples_of(case), packing_rules(config, policy.shares_prompts))
        divisor, loss_fn = (
            denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length),
            make_loss(config.algorithm),
        )
        train = _median(lambda: policy.train_step(batch, loss_fn, divisor), steps, warm_up)
        peak = device.memory_gb()
        logprobs = _median(lambda: policy.logprobs(batch), steps, 1)
        return Measured(train, logprobs, peak, len(batch.micro_batches))
    finally:
        policy = batch = None
        layout.release()
        gc.collect()
        device.release_memory()


def _median(action, count: int, warm_up: int) -> float:
    found = []
    for _ in range(warm_up + count):
        wait()
        started = time.perf_counter()
        action()
        wait()
        found.append(time.perf_counter() - started)
    return statistics.median(found[warm_up:])


def _forget_peak() -> None:
    import torch

    from megagrpo.platform import device

    if device.has_gpu():
        torch.cuda.reset_peak_memory_stats()


def variants(case: Case, recipes: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, Case], list[str]]:
    """(precision -> its case, reasons for the missing precisions)."""
    found, refused = {}, []
    for recipe in recipes:
        try:
            found[name_of(recipe)] = with_recipe(case, recipe, overrides)
        except ConfigError as error:
            refused.append(f"  {recipe}: {' '.join(str(error).split())}")
    return found, refused


def describe(case: Case, gpu: Gpu, predictions: dict[str, Case], refused: Sequence[str]) -> str:
    """Print a case so that its numbers can be checked by hand; the last summand of the FLOPs is attention's."""
    model, per_token = case.model, token_flops(case.model)
    responses, attention = sum(r for _, r in case.sizes), sum(attention_flops(model, p + r) for p, r in case.sizes)
    budget = case.config.train.max_tokens_per_micro_batch
    blocks, head = round(per_token.blocks / 2), round(per_token.head / 2)
    lines = [
        f"{case.name}: {model.family}, {model.num_layers} layers of {model.hidden_size}, {num_parameters(model)} "
        f"parameters, {blocks} of the blocks and {head} of the head meet a token",
        f"  samples      {len(case.sizes)}, {case.tokens} tokens, {responses} of responses; micro-batches of {budget} "
        f"at most, {-(-case.tokens // budget)} or more",
        f"  train step   {case.flops:.6e} FLOPs = 6 x {blocks} x {case.tokens} + 6 x {head} x {responses} + 3 x "
        f"{attention:.6e}",
    ]
    for name, variant in predictions.items():
        seconds, logprobs, gib = variant.predicted(gpu)
        rate = case.flops / seconds / 1e12
        lines.append(
            f"  predicted    {seconds:.2f} s = {rate:.0f} TFLOP/s; log-probs {logprobs:.2f} s; {gib:.1f} GiB ({name})"
        )
    return "\n".join([*lines, *refused])


def name_of(recipe: str) -> str:
    return "bf16" if recipe == "none" else recipe


def with_recipe(case: Case, recipe: str, overrides: Sequence[str]) -> Case:
    """The same case in FP8. ConfigError when the config does not allow it."""
    if recipe == "none":
        return case
    keys = f"model.fp8_recipe={recipe.removesuffix(KEPT)}", f"model.fp8_param={str(recipe.endswith(KEPT)).lower()}"
    return replace(case, config=run_config(case.config.model.path, *overrides, *keys))


def attempt(case: Case, recipe: str, overrides: Sequence[str], steps: int) -> tuple[Case, Measured] | None:
    """Measure the case; None, with the reason, when it cannot run here, so that the others still run."""
    import torch

    try:
        tried = with_recipe(case, recipe, overrides)
        return tried, measure(tried, steps)
    except (ValueError, RuntimeError) as error:  # refused, or out of memory
        if isinstance(error, torch.AcceleratorError):
            raise  # this process cannot continue
        print(f"{case.name}, {recipe}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return None


def report(
    case: Case,
    recipe: str,
    found: Measured,
    gpu: Gpu | None,
    ceilings: Ceilings | None,
    table: Table,
    bf16: float | None,
) -> None:
    """Two rows: the train step and the log-prob pass."""
    predicted = case.predicted(gpu) if gpu else (None, None, None)
    for what, seconds, flops, planned, gib in (
        ("train", found.train, case.flops, predicted[0], (found.peak_gib, predicted[2])),
        ("log-probs", found.logprobs, case.flops / 3, predicted[1], (None, None)),
    ):
        tflops = flops / seconds / 1e12
        faster = bf16 / seconds if bf16 and what == "train" else None
        mfu = tflops / gpu.bf16_tflops if gpu else None
        speed = (case.tokens / seconds, tflops, mfu, tflops / ceilings.bf16_tflops if ceilings else None, faster)
        table.row(f"{case.name}/{case.model.num_layers}", recipe, what, seconds, planned, *speed, *gib)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=(*SMALL, *LARGE, TINY), default=[*SMALL, *LARGE])
    made.add_argument(
        "--recipes",
        nargs="+",
        choices=RECIPES,
        default=RECIPES[:4],
        help=f"of model.fp8_recipe; none is bf16, {KEPT} with fp8_param",
    )
    made.add_argument("--layers", type=int, help="of every model; as many as fit when left out")
    made.add_argument("--steps", type=int, default=3, help="measured, after two to warm up")
    args = parse(made, arguments)
    gpu, ceilings = begin(args)
    failed = False
    with tempfile.TemporaryDirectory(prefix="train_step_") as scratch:
        gib = gpu.memory_gib if args.dry_run else memory_here()
        cases = [make_case(name, args.layers, gib, Path(scratch), args.overrides) for name in args.models]
        if args.dry_run:
            for case in cases:
                print(describe(case, gpu, *variants(case, args.recipes, args.overrides)))
            print(TARGETS)
            return 0
        table = Table(
            **dict(
                model__layers="<12",
                recipe="<15",
                what="<9",
                s="7.3f",
                predicted="9.3f",
                tokens__s="9.0f",
                TFLOP__s="7.1f",
            ),
            **dict(MFU="6.1%", of_GEMM="7.1%", of_bf16="7.2f", peak_GiB="8.1f", predicted_GiB="13.1f"),
        )
        for case in cases:
            bf16 = None
            for recipe in args.recipes:
                done = attempt(case, recipe, args.overrides, args.steps)
                if done is None:
                    failed = True
                    continue
                tried, found = done
                report(tried, name_of(recipe), found, gpu, ceilings, table, bf16)
                bf16 = found.train if recipe == "none" else bf16
    print(TARGETS)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
