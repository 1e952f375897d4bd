"""The records of a run: its lines, its recorders, and the clocks of its steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from megagrpo.config import RolloutSection, RunConfig
from megagrpo.data.tokens.token_texts import TokenTexts
from megagrpo.families.hf_config import HfConfig
from megagrpo.planner.costs.flops import step_flops
from megagrpo.planner.costs.gpu_specs import bf16_tflops_of
from megagrpo.platform import device
from megagrpo.platform.device import memory_in_use
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.records.profile import Profiler
from megagrpo.records.progress_bars import run_progress
from megagrpo.records.rows.dump import StepDumps
from megagrpo.records.rows.recorder import Recorder, Recorders, Update
from megagrpo.records.rows.run_starts import record_start
from megagrpo.records.rows.step_metrics import idle_shares
from megagrpo.records.rows.token_log import TokenLog
from megagrpo.records.writer import CompletionsLog, MetricsWriter
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.trainer.run_inputs import Inputs, ModelFiles
from megagrpo.trainer.saving.run_folder import RunFolder
from megagrpo.weights.files.tensor_files import dtype_name


@dataclass(frozen=True)
class Records:
    """What a run writes about its steps, and when: `recorders` wrap the verbs of a step, `phases` time them."""

    writer: MetricsWriter
    phases: Phases
    recorders: Recorders
    profiler: Profiler
    speed: Speed
    pool: AsyncPool | None = None

    def start_clocks(self, title: str) -> None:
        """Reset the timers, so that the next step's times begin now, and begin its progress titles with `title`."""
        self.phases.collect("between_steps")
        self.phases.about = title
        if self.pool is not None:
            self.pool.measured()

    def with_speed(self, metrics: dict[str, float], synced: dict[str, float]) -> dict[str, float]:
        """Add the seconds of each phase, the metrics of the weight sync, rates of tokens and FLOPs, and memory to the
        metrics of a step. Collective."""
        times = self.phases.collect()
        speed = self.speed.metrics(metrics["num_tokens"], metrics["num_generated_tokens"], times)
        speed |= idle_shares(times) if "time/generate" in times else {}
        speed |= self.pool.measured() if self.pool is not None else {}
        return metrics | times | synced | speed


@dataclass(frozen=True)
class Journal:
    """What is written from the start of a run, before its policy exists. `progress` shows long work."""

    folder: RunFolder
    writer: MetricsWriter
    tokens: TokenLog
    progress: Progress
    phases: Phases


def open_journal(inputs: Inputs, layout: Layout, resources: ExitStack) -> Journal:
    """Open the files of the run on rank 0, and print what the run is and the notes. Other ranks write nothing."""
    config, folder, dtype = inputs.config, inputs.folder, dtype_name(inputs.model.dtype)
    first, step = layout.world_rank == 0, folder.restored_step
    writer = resources.enter_context(MetricsWriter(folder.path, config, step) if first else MetricsWriter.silent())
    if first:
        try:
            record_start(folder.path, step, layout, dtype)
        except OSError as error:
            writer.message(f"warning: starts.jsonl could not be written; the run continues. {error}")
    context = f" x cp {layout.parallel.cp}" if layout.parallel.cp > 1 else ""
    writer.message(
        f"{config.run.name}: {config.model.path} in {dtype} on {layout.world_size} rank(s) = tp "
        f"{layout.parallel.tp}{context} x pp {layout.parallel.pp} x dp {layout.dp_size}"
    )
    for line in (f"run folder: {folder.path}", *inputs.notes):
        writer.message(line)
    sizes = config.run.log_tokens_groups, config.samples_per_row
    texts = TokenTexts(inputs.data.tokenizer) if inputs.data.tokenizer else None
    tokens = TokenLog(layout, texts, *sizes, writer.message)
    if first:
        tokens.open(folder.path, step)
    resources.callback(tokens.close)
    progress = run_progress(config.run) if first else SILENT
    phases = Phases(progress)
    phases.ended = writer.phase
    return Journal(folder, writer, tokens, progress, phases)


def make_records(
    config: RunConfig,
    journal: Journal,
    model: ModelFiles,
    policy: MegatronPolicy,
    reference: Reference | None,
    pool: AsyncPool | None,
    critic: ScalarModel | None = None,
) -> Records:
    """Make the recorders of the run, and the clocks and profiles of its policy's phases. A run on rows has no
    completions: its responses are those of the data set."""
    folder, writer = journal.folder.path, journal.writer
    weights = model.folder, writer.message, reference, model.reference_folder, critic
    dumps = StepDumps(policy, folder / "dumps", *weights)
    speed = make_speed(policy, config.rollout, config.run.peak_tflops, config.lora.enabled)
    completions = [CompletionsLog(policy.layout, writer)] if config.algorithm.loss.generates else []
    profiler = Profiler(config.run.profile, folder, policy.layout.world_rank, writer.message)
    policy.phases, journal.phases.mark = journal.phases, profiler.mark
    return Records(
        writer, journal.phases, Recorders((*completions, journal.tokens, dumps, speed)), profiler, speed, pool
    )


@dataclass
class Speed(Recorder):
    """Counts the FLOPs of a step's optimizer steps, and derives metrics from a step's tokens and times.

    `num_devices` are the GPUs of the trainer and of dedicated servers; on a machine without GPUs the ranks. `peak` is
    the peak FLOP/s of one rank's device, if known. With `frozen` only adapters are trained. With `runs_ahead`
    generation is as long as the step.
    """

    layout: Layout
    hf_config: HfConfig
    num_devices: int
    peak: float | None
    frozen: bool
    runs_ahead: bool
    _flops: float = 0.0

    def after_update(self, update: Update) -> None:
        """Count the FLOPs of one optimizer step."""
        tokens = update.batch.computed
        self._flops += step_flops(self.hf_config, tokens.spans, tokens.num_loss, frozen=self.frozen)

    def metrics(self, num_tokens: float, num_generated: float, times: dict[str, float]) -> dict[str, float]:
        """Return the step's rates, and memory. Collective.

        `num_tokens` counts the tokens of samples, `num_generated` the tokens of responses. MFU is forward and backward
        passes' share of the peak during `time/train`, over all ranks. Without a known peak it is left out.
        """
        flops, self._flops = self._flops, 0.0
        step = times["time/step"]
        rates = {
            "tokens_per_second": num_tokens / step,
            "tokens_per_second_per_gpu": num_tokens / step / self.num_devices,
        }
        if generating := step if self.runs_ahead else times.get("time/generate", 0.0):
            rates["generated_tokens_per_second"] = num_generated / generating
        if self.peak is not None and (training := times.get("time/train", 0.0)):
            rates["mfu"] = flops / (training * self.layout.world_size * self.peak)
        return rates | self._memory()

    def _memory(self) -> dict[str, float]:
        """Return the memory of this rank, of the fullest rank, and of this rank's host, in GiB."""
        own = {"resident_max_gb": memory_in_use.resident_gb()} | memory_in_use.gpu_peaks()
        maxima = self.layout.all_reduce(torch.tensor(list(own.values()), dtype=torch.float64), "max").tolist()
        fullest = {f"memory/{name}": value for name, value in zip(own, maxima, strict=True)}
        here = {"memory_gb": device.memory_gb(), "memory/resident_gb": own["resident_max_gb"]}
        return here | fullest | {"memory/host_gb": memory_in_use.host_used_gb()}


def make_speed(policy: MegatronPolicy, rollout: RolloutSection, peak_tflops: float | None, frozen: bool) -> Speed:
    """Return the trainer's speed. Its peak is `run.peak_tflops`, else a known GPU's BF16 value from its data sheet."""
    alone = rollout.placed == "colocated" or not device.has_gpu()
    num_devices = policy.layout.world_size + (0 if alone else rollout.server_gpus)
    if peak_tflops is None and device.has_gpu() and policy.dtype == torch.bfloat16:
        peak_tflops = bf16_tflops_of(device.name())
    peak = None if peak_tflops is None else peak_tflops * 1e12
    return Speed(policy.layout, policy.hf_config, num_devices, peak, frozen, rollout.max_staleness > 0)
