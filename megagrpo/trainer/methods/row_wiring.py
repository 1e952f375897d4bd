"""Wiring of the methods that learn from the responses of rows: the parts of GRPO's wiring without an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megagrpo.config import AlgorithmSection, DataSection, DatasetSection, RunConfig, evaluation_sets
from megagrpo.data.examples import Layout as RowLayout
from megagrpo.data.examples import example_reader
from megagrpo.data.sources.prompt_order import PromptOrder
from megagrpo.data.tokens.sampling import sampling_of
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.platform.parallel.agree import on_first_rank
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.train_types import LossFn, TrainState
from megagrpo.trainer.alarms import make_alarms
from megagrpo.trainer.engine_side import as_config_errors
from megagrpo.trainer.gpu.gpu_sharing import GpuTurns
from megagrpo.trainer.lifecycle import make_lifecycle, make_saves
from megagrpo.trainer.methods.row_loop import RowCollector, RowEvaluations, RowLoop, Rows
from megagrpo.trainer.policy_update import Learning, load_policy
from megagrpo.trainer.recording import make_records, open_journal
from megagrpo.trainer.run_inputs import Data, order_on_all, read_inputs
from megagrpo.weights.bridge.hf_export import save_hf
from megagrpo.weights.files.tensor_files import dtype_name

TRAINED_MODEL = "model"  # folder of the trained model in a run's folder


@dataclass(frozen=True)
class Method:
    """What a method on rows differs in: its loss, and what its rows hold."""

    make_loss: Callable[[AlgorithmSection], LossFn]
    layout: RowLayout
    kind: type[MegatronPolicy] = MegatronPolicy
    prepare: Callable[[Any, Data], None] = lambda policy, data: None  # the policy, once it is loaded
    finish: Callable[[Any, Path, Data], None] = lambda policy, folder, data: None  # the trained model's folder


def build_rows(
    method_of: Callable[[RunConfig], Method], config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack
) -> RowLoop:
    """Build every component of a run on rows. Components to close are entered into `resources`. Raises ConfigError for
    errors that the user can fix."""
    method = method_of(config)
    with as_config_errors():
        read_data = partial(_read_rows, method)
        inputs = read_inputs(config, base_folder, layout, resources, method.make_loss, read_data)
    config, data, model, folder, state = inputs.config, inputs.data, inputs.model, inputs.folder, TrainState()
    journal = open_journal(inputs, layout, resources)
    say, phases = journal.writer.message, journal.phases
    policy, reference = load_policy(config, layout, model, data.sampling, journal.progress, method.kind)
    with as_config_errors():
        method.prepare(policy, data)
    collector = RowCollector(layout, None, None, phases)
    turns = GpuTurns(layout, stop_if_requested=collector.stop_if_requested, phases=phases)
    records = make_records(config, journal, model, policy, reference, None)
    alarms = make_alarms(config, state, policy, dtype_name(policy.dtype), collector.reward_tracebacks, say)
    learning = Learning(config, policy, reference, inputs.loss_fn, state, records.recorders, phases, alarms.count_skip)
    saves = make_saves(inputs, policy, reference, None, state, collector, turns, journal.writer)
    rows = Rows(data.prompts, collector, learning, config.samples_per_row)
    common = state, collector, turns, records, inputs.callbacks, saves
    evaluations = RowEvaluations([], config.evaluation, config.run, *common)
    evaluations.sets, evaluations.rows, evaluations.loss_fn = data.held_rows, rows, inputs.loss_fn
    lifecycle = make_lifecycle(inputs, layout, evaluations, alarms)
    if folder.resume_from is not None:
        saves.restore(folder.resume_from, inputs.data_change)
    export = partial(write_model, method, policy, data, model.folder, folder.path / TRAINED_MODEL, say)
    return RowLoop(state, rows, learning, records, lifecycle, export)


def write_model(
    method: Method, policy: MegatronPolicy, data: Data, source: Path, out: Path, say: Callable[[str], None]
) -> None:
    """Write the trained weights, with merged adapters, as the Hugging Face folder `out`, so that another run starts
    from it. A folder of an earlier end of the run is replaced. Collective."""
    layout = policy.layout
    on_first_rank(layout, lambda: remove(out))
    save_hf(policy.chunks, policy.hf_config, layout, out, source, dtype=policy.dtype)
    method.finish(policy, out, data)
    say(f"model {out}")


def _read_rows(
    method: Method,
    config: RunConfig,
    base_folder: Path,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None],
    vocab_size: int,
    layout: Layout,
    resources: ExitStack,
) -> tuple[RunConfig, Data]:
    """Load the rows to learn from and the held-out rows. Returns the config with its number of steps, and the data."""
    tokenizer, seed = tokenizers[0], config.run.seed
    make = example_reader(config, tokenizer, method.layout) if tokenizer else None

    def read(section: DatasetSection, data: DataSection, key: str) -> PromptOrder:
        own = partial(make, section, data, key) if make else None
        return order_on_all(own, data, key, seed, layout)

    rows = read(config.data.train, config.data, "data.train")
    sets = {}
    for name, section in evaluation_sets(config).items():
        data = config.data.model_copy(update={key: getattr(section, key) for key in ("prompt_column", "columns")})
        sets[name] = read(section, data, f"evaluation.sets.{name}" if name else "data.eval")
    return config.with_num_prompts(len(rows)), Data(tokenizer, sampling_of(config.rollout), rows, [], {}, None, sets)
