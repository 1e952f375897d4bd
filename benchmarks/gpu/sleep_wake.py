"""GPU memory of trainer and vLLM on a shared GPU, at each moment of a step, and the time for sleep and wake-up.

    python -m benchmarks.gpu.sleep_wake                       # Qwen2.5-1.5B's shape, all layers, random weights
    python -m benchmarks.gpu.sleep_wake --model 7b            # as many layers as fit while vLLM sleeps
    python -m benchmarks.gpu.sleep_wake train.offload=false   # the trainer stays on the GPU while vLLM generates
    python -m benchmarks.gpu.sleep_wake --dry-run

The moments follow `Trainer.step` with a colocated server: generate, sleep, reload the trainer, train, sync. Memory in
GiB: for the trainer, torch's allocator including its cached free blocks. For vLLM, all other GPU memory in use, except
the trainer's CUDA context, which is measured before vLLM starts. Bytes that move between GPU and host are the plan's.
Medians of `--rounds` rounds after a first one, in which the host memory is allocated.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.setting import LARGE, SMALL, TINY, Table, begin, parse, parser, run_config, shape, wait, write_shape
from benchmarks.gpu.train_step import USABLE, Case, memory_here, planned_gib, samples_of, sizes_of
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.planner.costs.engine_memory import ServerMemory
from megagrpo.planner.costs.planned_memory import moved_bytes, on_shared_gpu, trainer_memory

TARGET = "target on one H200: trainer while vLLM generates <= 5 GiB"
MOMENTS = ("generating", "vLLM asleep", "trainer back", "after the train step", "after the sync")
Round = dict[str, tuple[float, float | None, float | None]]  # moment -> seconds up to it, GiB of the trainer, of vLLM


def make_case(name: str, gib: float, folder: Path, overrides: Sequence[str]) -> Case:
    """The number of layers that fit, with vLLM's share if the trainer stays on the GPU."""
    whole, path = shape(name)["num_hidden_layers"], write_shape(shape(name), folder / name)
    config = run_config(path, *overrides)
    room = USABLE * gib * (1 if config.takes_turns else 1 - config.rollout.gpu_memory_utilization)
    layers = next((n for n in range(whole, 1, -1) if planned_gib(config, parse_hf_config(shape(name, n))) <= room), 1)
    write_shape(shape(name, layers), path)
    return Case(name, parse_hf_config(shape(name, layers)), config, sizes_of(config))


def describe(case: Case, gib: float) -> str:
    """Print the plan: the GPU's memory by phase, vLLM's share, and the bytes that move to the host."""
    server = ServerMemory.of(case.config, case.model)
    engine, share = server.parts(gib), case.config.rollout.gpu_memory_utilization
    reload = server.reload_bytes() / 2**30
    memory = on_shared_gpu(case.config, trainer_memory(case.config, case.model, dp=1), engine, reload)
    lines = [f"{case.name}: {case.model.num_layers} layers; vLLM's share {share:g} x {gib:g} = {share * gib:.1f} GiB"]
    for phase in ("generate", "train", "sync"):
        parts = ", ".join(f"{part} {size:.1f}" for part, size in memory[phase].items() if size > 0.05)
        lines.append(f"  {phase:9} {sum(memory[phase].values()):6.1f} GiB: {parts}")
    moved = moved_gib(case)
    lines.append(
        f"  {moved:.1f} GiB leave the GPU before responses and come back after them"
        if moved
        else "  nothing leaves the GPU"
    )
    return "\n".join(lines)


def moved_gib(case: Case) -> float:
    """GiB that the trainer offloads to the host and reloads in each step."""
    return moved_bytes(case.config, case.model, 1)[0] / 2**30 if case.config.takes_turns else 0.0


def measure(case: Case, scratch: Path, rounds: int) -> tuple[list[Round], list[Counter[str]], float]:
    """(each round's moments, seconds of its requests to the server, GiB of vLLM before its first sleep)."""
    from benchmarks.gpu.pair import pair
    from benchmarks.weight_sync import PROMPTS, SAMPLING, requests_timed
    from megagrpo.algorithms.losses import make_loss
    from megagrpo.algorithms.reductions import denominator
    from megagrpo.data.packing.sample_packing import pack, packing_rules

    found, requests = [], []
    with pair(case.config, scratch, trains=True, offloads=case.config.train.offload is not False) as both:
        config, policy = case.config, both.policy
        batch = pack(samples_of(case), packing_rules(config, policy.shares_prompts))
        divisor, loss_fn = (
            denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length),
            make_loss(config.algorithm),
        )

        both.push()
        for number in range(1 + rounds):
            moments: Round = {}
            with requests_timed() as timed:
                for name, action in (
                    (MOMENTS[0], lambda: both.engine.generate(PROMPTS, 1, SAMPLING, number)),  # noqa: B023
                    (MOMENTS[1], both.sleep),
                    (MOMENTS[2], both.offload.load_all),
                    (MOMENTS[3], lambda: policy.train_step(batch, loss_fn, divisor)),
                    (MOMENTS[4], both.push),
                ):
                    started = time.perf_counter()
                    action()
                    wait()
                    moments[name] = (time.perf_counter() - started, *both.held_gib())
            found.append(moments)
            requests.append(timed)
        return found, requests, both.started_gib


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--model", choices=(*SMALL, *LARGE, TINY), default="1.5b")
    made.add_argument("--rounds", type=int, default=3, help="after a first one")
    args = parse(made, arguments)
    gpu, _ = begin(args)
    gib = gpu.memory_gib if args.dry_run else memory_here()
    with tempfile.TemporaryDirectory(prefix="sleep_wake_") as scratch:
        case = make_case(args.model, gib, Path(scratch), args.overrides)
        print(describe(case, gib), flush=True)
        if args.dry_run:
            print(TARGET)
            return 0
        rounds, requests, started_gib = measure(case, Path(scratch), args.rounds)
    shown = Table(moment="<28", s="8.3f", trainer_GiB="12.2f", vLLM_GiB="9.2f")
    shown.row("vLLM started", None, None, started_gib)
    for moment in MOMENTS:
        columns = zip(*(one[moment] for one in rounds[1:]), strict=True)
        shown.row(moment, *(None if column[0] is None else statistics.median(column) for column in columns))
    seconds = {key: statistics.median(one[key] for one in requests[1:]) for key in ("sleep", "wake_up")}
    print(
        f"requests: sleep {seconds['sleep']:.3f} s, wake_up {seconds['wake_up']:.3f} s (weights and KV cache "
        f"together)\n{TARGET}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
