"""The records of a run: its lines, its recorders, and the clocks of its steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from megagrpo.config import RunConfig
from megagrpo.data.tokens.token_texts import TokenTexts
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.records.profile import Profiler
from megagrpo.records.progress_bars import run_progress
from megagrpo.records.rows.dump import StepDumps
from megagrpo.records.rows.recorder import Recorders
from megagrpo.records.rows.run_starts import record_start
from megagrpo.records.rows.step_metrics import idle_shares
from megagrpo.records.rows.token_log import TokenLog
from megagrpo.records.writer import CompletionsLog, MetricsWriter
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.trainer.run_inputs import Inputs, ModelFiles
from megagrpo.trainer.saving.run_folder import RunFolder
from megagrpo.trainer.saving.speed import Speed, make_speed
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
