"""Wiring: builds every component of a run from its config, and the `Trainer` made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megagrpo.algorithms.losses import make_loss
from megagrpo.config import RunConfig
from megagrpo.data.prompts import PromptSource
from megagrpo.data.token_texts import TokenTexts
from megagrpo.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from megagrpo.engine.servers.serving import engine_dtype, name_of, offloads
from megagrpo.environments.dialogues import Dialogues, make_dialogues
from megagrpo.models.bridge.adapter_files import fill_adapters
from megagrpo.models.bridge.load import Checkpoint, load_hf
from megagrpo.models.bridge.parameter_blocks import adapter_blocks, merged_blocks
from megagrpo.models.families.hf_config import HfConfig, architecture_differences, load_hf_config
from megagrpo.models.families.weight_sources import resolve_model
from megagrpo.platform import device
from megagrpo.platform.parallel.agree import on_first_rank, run_and_agree, run_own_and_agree
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.phases import Phases
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.platform.process.variables import TOKEN_VARIABLE
from megagrpo.policy.device_checks import check_device
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import apex_note
from megagrpo.policy.reference import Reference
from megagrpo.records.checkpoint import Checkpointer
from megagrpo.records.dump import StepDumps
from megagrpo.records.profile import Profiler, check_profile
from megagrpo.records.progress_bars import run_progress
from megagrpo.records.run_lock import RunLock
from megagrpo.records.sinks.find_trackers import check_trackers, unused_options
from megagrpo.records.starts import record_start
from megagrpo.records.token_log import TokenLog
from megagrpo.records.writer import MetricsWriter
from megagrpo.rewards.scorer import RewardScorer
from megagrpo.trainer.callbacks import Callbacks, load_callbacks
from megagrpo.trainer.engine_side import as_config_errors, check_servers, connect, start_servers
from megagrpo.trainer.evaluation.sets import HeldOut, check_columns, load_sets
from megagrpo.trainer.gpu_turns import GpuTurns
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.trainer.rollout.collector import Collector, sampling_params
from megagrpo.trainer.run_folder import prepare_run_folder
from megagrpo.trainer.state_offload import NoOffload, Offload
from megagrpo.trainer.trainer import Trainer
from megagrpo.trainer.trials.reward_trial import start_warnings
from megagrpo.types import LossFn


@dataclass(frozen=True)
class Inputs:
    """What a run reads and checks before it starts servers or loads weights. `dialogues` and `rewards` are None except
    on the leader rank of each replica; `dialogues` also without `multi_turn`. `config` has `run.max_steps` set if the
    data decided it;
    `notes` are lines for the user."""

    config: RunConfig
    notes: list[str]
    token: str | None
    urls: list[str]
    loss_fn: LossFn
    callbacks: Callbacks
    model_folder: Path
    hf_config: HfConfig
    reference_folder: Path | None
    lock: RunLock
    resume_from: Path | None
    tokenizer: Tokenizer
    dialogues: Dialogues | None
    prompts: PromptSource
    held_out: list[HeldOut]
    rewards: RewardScorer | None


def build(config: RunConfig, base_folder: Path, layout: Layout, resources: ExitStack) -> Trainer:
    """Build every component of a run. Components to close are entered into `resources`.

    vLLM starts while Megatron loads, unless they share GPUs. Raises ConfigError for errors that the user can fix.
    """
    run_folder, first = Path(config.run.output_dir) / config.run.name, layout.world_rank == 0
    with as_config_errors():
        inputs = _read_inputs(config, base_folder, run_folder, layout, resources)
    config = inputs.config
    writer = _open_writer(config, run_folder, inputs, layout, resources)
    progress = run_progress(config.run) if first else SILENT
    tokens = _open_token_log(config, run_folder, inputs, layout, writer.message, resources)
    access = inputs.token, inputs.urls
    servers = start_servers(
        config, inputs.model_folder, run_folder, layout, *access, writer.message, progress, resources
    )
    policy, reference = _load_policy(config, layout, inputs, progress)
    if note := apex_note(policy.optimizer):
        writer.message(note)
    engine, weight_sync = connect(servers, config, layout, inputs.tokenizer.decode, writer.message, resources)
    pool = None
    if engine is not None and inputs.rewards is not None and config.rollout.max_staleness:
        pool = resources.enter_context(
            AsyncPool(engine, inputs.rewards, config.rollout.max_staleness, config.rollout.straggler_seconds)
        )
    phases, say, dumps = Phases(progress), writer.message, run_folder / "dumps"
    profiler = Profiler(config, run_folder, layout.world_rank, say)
    policy.phases, phases.mark = phases, profiler.mark
    generator = inputs.dialogues.wrap(engine) if inputs.dialogues and engine else engine
    collector = Collector(layout, generator, inputs.rewards, phases, pool)
    offload = Offload(policy, reference) if offloads(config) else NoOffload()
    blocks = adapter_blocks if config.lora.syncs_adapters else merged_blocks
    saves_to = run_folder / "checkpoints"
    trainer = Trainer(
        config=config,
        layout=layout,
        policy=policy,
        reference=reference,
        loss_fn=inputs.loss_fn,
        prompts=inputs.prompts,
        held_out=inputs.held_out,
        collector=collector,
        sampling=sampling_params(config.rollout, inputs.tokenizer.eos_token_ids),
        weights=partial(blocks, policy.chunks, inputs.hf_config, layout),
        weight_sync=weight_sync,
        checkpointer=Checkpointer(
            saves_to, layout, policy, config.run.save_total_limit, inputs.model_folder, reference
        ),
        writer=writer,
        dumps=StepDumps(config, policy, dumps, inputs.model_folder, say, reference, inputs.reference_folder),
        phases=phases,
        profile=profiler.step,
        turns=GpuTurns(layout, engine if first else None, servers.sleep, offload, collector.stop_if_requested, phases),
        dtype=max(name_of(policy.dtype), engine_dtype(config), key=("float32", "bfloat16").index),
        run_folder_check=inputs.lock.check if first else lambda: None,
        callbacks=inputs.callbacks,
        tokens=tokens,
    )
    if inputs.resume_from is not None:
        trainer.saves.restore(inputs.resume_from)
    return trainer


def _read_inputs(
    config: RunConfig, base_folder: Path, run_folder: Path, layout: Layout, resources: ExitStack
) -> Inputs:
    """Read and check all inputs, and lock the run's folder. Collective. Raises ValueError, with the key, for an input
    that is wrong."""
    first = layout.world_rank == 0
    token, urls = on_first_rank(layout, lambda: check_servers(config))
    os.environ.pop(TOKEN_VARIABLE, None)  # reward functions must not see the token
    loss_fn = run_own_and_agree(layout, lambda: make_loss(config.algorithm))
    callbacks = run_own_and_agree(layout, lambda: load_callbacks(config), here=first)
    run_own_and_agree(layout, lambda: check_trackers(config), here=first)
    check_profile(config.run.profile, device.has_gpu())
    model_folder = resolve_model(config.model.path)
    hf_config = load_hf_config(model_folder)
    run_own_and_agree(layout, lambda: check_device(config, hf_config))  # before weights are loaded or servers started
    run_and_agree(layout, lambda: Checkpoint(model_folder).check_all(hf_config), here=first)
    lock = RunLock(run_folder)
    resources.callback(lock.release)
    resume_from = on_first_rank(layout, lambda: prepare_run_folder(config, lock, os.environ.get("MEGAGRPO_JOB")))
    tokenizer = tokenizer_of(config, model_folder)
    reference_folder = _reference_folder(config, hf_config, tokenizer)
    dialogues = run_own_and_agree(
        layout, lambda: make_dialogues(config, tokenizer, base_folder, resources), here=layout.is_dp_leader
    )
    tools, columns = on_first_rank(layout, lambda: (dialogues.tools, dialogues.columns) if dialogues else ([], []))
    prompts = PromptSource(
        config.data.train, config.data, tokenizer, config.rollout.max_prompt_length, config.run.seed, tools=tools
    )
    given, config = config, config.with_num_prompts(len(prompts))
    held_out = load_sets(config, tokenizer, tools, columns)
    rewards = run_own_and_agree(
        layout, lambda: _rewards(config, base_folder, prompts.columns, held_out, resources), here=layout.is_dp_leader
    )
    warnings = start_warnings(config, prompts, held_out, rewards, tokenizer) if first and rewards else []
    return Inputs(
        config=config,
        notes=[*_steps_notes(given, config, len(prompts)), *unused_options(config), *warnings],
        token=token,
        urls=urls,
        loss_fn=loss_fn,
        callbacks=Callbacks(config, layout, callbacks),
        model_folder=model_folder,
        hf_config=hf_config,
        reference_folder=reference_folder,
        lock=lock,
        resume_from=resume_from,
        tokenizer=tokenizer,
        dialogues=dialogues,
        prompts=prompts,
        held_out=held_out,
        rewards=rewards,
    )


def _reference_folder(config: RunConfig, model: HfConfig, tokenizer: Tokenizer) -> Path | None:
    """Return the folder of `model.reference_path`, or None. Raises ValueError when its architecture or vocabulary is
    not the policy's."""
    if config.model.reference_path is None:
        return None
    folder = resolve_model(config.model.reference_path, "model.reference_path")
    different = architecture_differences(model, load_hf_config(folder))
    if not different and (folder / "tokenizer_config.json").exists():
        pairs = zip(tokenizer.pieces(), load_tokenizer(folder).pieces(), strict=False)
        different = [f"token {i}: {one!r}, {other!r}" for i, (one, other) in enumerate(pairs) if one != other][:1]
    if different:
        raise ValueError(
            f"model.reference_path: {folder} differs from the policy in architecture or vocabulary (policy, "
            f"reference): "
            f"{'; '.join(different)}. Name weights that match, or leave it empty to use the policy's initial weights"
        )
    return folder


def _rewards(
    config: RunConfig, base_folder: Path, columns: list[str], held_out: list[HeldOut], resources: ExitStack
) -> RewardScorer:
    scorer = resources.enter_context(RewardScorer(config.rewards, config.rollout.max_completion_length, base_folder))
    scorer.check_columns(columns)
    check_columns(held_out, scorer)
    return scorer


def _open_writer(
    config: RunConfig, run_folder: Path, inputs: Inputs, layout: Layout, resources: ExitStack
) -> MetricsWriter:
    """Open the metrics of the run on rank 0, and print what the run is; a silent writer on other ranks."""
    restored_step = _step_of(inputs.resume_from)
    writer = MetricsWriter(run_folder, config, restored_step) if layout.world_rank == 0 else MetricsWriter.silent()
    resources.callback(writer.close)
    dtype = name_of(device.resolve_precision(config.model.precision))
    if layout.world_rank == 0:
        try:
            record_start(run_folder, restored_step, layout, dtype)
        except OSError as error:
            writer.message(f"warning: starts.jsonl could not be written; the run continues. {error}")
    context = f" x cp {layout.cp_size}" if layout.cp_size > 1 else ""
    writer.message(
        f"{config.run.name}: {config.model.path} in {dtype} on {layout.world_size} rank(s) "
        f"= tp {layout.tp_size}{context} x pp {layout.pp_size} x dp {layout.dp_size}"
    )
    writer.message(f"run folder: {run_folder}")
    for note in inputs.notes:
        writer.message(note)
    return writer


def _steps_notes(given: RunConfig, config: RunConfig, num_prompts: int) -> list[str]:
    """Return a line that says how `run.num_train_epochs` became a number of steps, or that it has no effect."""
    epochs, steps = given.run.num_train_epochs, config.run.num_steps
    if epochs is None:
        return []
    if given.run.max_steps is not None:
        return [
            f"note: run.max_steps {steps} takes precedence over run.num_train_epochs {epochs:g}; run.max_steps=null "
            f"selects the epochs"
        ]
    per_step = config.rollout.prompts_per_step
    return [
        f"{steps} steps: run.num_train_epochs {epochs:g} x {num_prompts} prompts / rollout.prompts_per_step {per_step}"
    ]


def _open_token_log(
    config: RunConfig,
    run_folder: Path,
    inputs: Inputs,
    layout: Layout,
    say: Callable[[str], None],
    resources: ExitStack,
) -> TokenLog:
    """Return the token log of the run; only rank 0 opens its file."""
    tokens = TokenLog(
        layout, TokenTexts(inputs.tokenizer), config.run.log_tokens_groups, config.rollout.num_generations, say
    )
    if layout.world_rank == 0:
        tokens.open(run_folder, _step_of(inputs.resume_from))
    resources.callback(tokens.close)
    return tokens


def _step_of(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint's folder; 0 for a fresh start."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))


def _load_policy(
    config: RunConfig, layout: Layout, inputs: Inputs, progress: Progress
) -> tuple[MegatronPolicy, Reference | None]:
    """Build the policy and load its weights, and the reference's, if the run has one. Collective. Raises
    ConfigError."""
    torch.manual_seed(config.run.seed)
    with as_config_errors():
        hf_config, folder, reference = inputs.hf_config, inputs.reference_folder, None
        policy = MegatronPolicy(config, layout, hf_config)
        if folder is not None:
            run_own_and_agree(layout, lambda: load_hf(policy.chunks, hf_config, folder, layout, progress))
            reference = Reference(policy)
        run_own_and_agree(layout, lambda: load_hf(policy.chunks, hf_config, inputs.model_folder, layout, progress))
        fill_adapters(policy.chunks, hf_config, layout, config.lora, config.run.seed)
    policy.weights_changed()
    if reference is None and config.algorithm.beta:
        reference = Reference(policy)
    return policy, reference
