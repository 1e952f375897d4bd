"""Whole steps on disk for `megagrpo audit`: `dumps/step_N/` holds all inputs and results of step N.

step.json         samples with texts, rewards, advantages, and the index of the trajectory: that of its first sample;
                  its branches follow after the first samples of all trajectories; with `algorithm.advantage_by`
                  `turn_advantages` of the branches' turns, then of the first sample's; with functions per turn
                  `rewards_by_turn` by function, and `turn_rewards` with weights and the scheduler's; with functions
                  per turn or token the `outcome`, the reward that no token has; per optimizer step its samples,
                  weights, denominator, metrics (with loss and gradient norm); the model that the run started from, and
                  the reference; the configuration and library versions. Numbers that JSON lacks are the strings "nan",
                  "inf" and "-inf".
samples.safetensors
                  `token_ids` [sum of L] int64, `borders` [N + 1] int64, `prompt_lengths` [N] int64, `rollout_logprobs`
                  [sum of L] float64 (0 if not `written`), `written` [sum of L] bool (the policy wrote it), and with
                  `rollout.routing_replay: engine` `routes` [sum of L, M, k], the experts of each token, and with
                  `advantage_by` token or process `token_rewards` [sum of L] float64, with weights (NaN: none)
update_K.safetensors
                  one row per loss token as optimizer step K saw it: `sample`, `token` (its index in the sample),
                  `token_id`, `advantage`, `policy_logprobs`, `old_logprobs`, `ref_logprobs`, `rollout_logprobs`,
                  `entropy`, `full_kl`, `teacher.NAME` (divergence or log-probs; NaN: not taught), `values` and
                  `returns` of the critic. Columns that the step does not compute are missing
optimizer_K.safetensors
                  64 elements of every trained tensor, `places.NAME` [n] in the flattened tensor, `values.NAME` [n, 5]
                  float32: weight and Adam's two moments before optimizer step K, clipped gradient, weight after it. For
                  bf16 `weight` is the float32 master that Adam updates. Missing with Muon or fp8_param
reference/        the reference's weights as a Hugging Face folder, once they have changed
weights_K/        the weights before optimizer step K as a Hugging Face folder. Missing for the run's first optimizer
                  step: the weights are the model's
                  With LoRA both are adapters, as PEFT folders, in every step
critic_K/         the critic's weights before its optimizer step K, in the same form, and `score.weight` [1, H] of its
                  head in score.safetensors
images/           with `data.images` the files of the prompts' images, which `images` of each sample names in order

A dump is complete or absent. A dumped step computes the same results as any other step.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from megagrpo.data.images.prompt_images import PromptImages
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform.parallel.agree import on_first_rank, run_own_and_agree
from megagrpo.platform.parallel.bulk_messages import parts_to_first_rank
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.policy.layers.scalar_head import SCORE, SCORE_FILE
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import moments_of
from megagrpo.policy.reference import Reference
from megagrpo.policy.scalar_model import ScalarModel
from megagrpo.records.rows.completions import part_columns
from megagrpo.records.rows.recorder import Recorder, TrainedRollouts, Update
from megagrpo.records.rows.run_starts import package_versions
from megagrpo.records.rows.step_metrics import values_of
from megagrpo.train_types import LossFn, LossInputs, LossOutput
from megagrpo.types import Prompt, ScoredRollout
from megagrpo.weights.blocks.optimizer_sample import Read, sample
from megagrpo.weights.blocks.parameter_blocks import adapter_blocks
from megagrpo.weights.bridge.adapter_files import save_adapter
from megagrpo.weights.bridge.hf_export import Source, find_sources, save_hf
from megagrpo.weights.bridge.hf_files import SHARD_BYTES
from megagrpo.weights.files.tensor_files import dtype_name

STEP_FILE = "step.json"

Rows = dict[str, Tensor]
Sampled = dict[str, tuple[Tensor, Tensor]]


class StepDumps(Recorder):
    """Writes the steps that `debug.dump_steps` names into `folder`. In every other step its methods do nothing.

    All methods are collective. A dump that fails is reported to `say` and abandoned; the run continues.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        folder: Path,
        model_folder: Path,
        say: Callable[[str], None],
        reference: Reference | None = None,
        reference_folder: Path | None = None,
        critic: ScalarModel | None = None,
    ):
        """`reference_folder` holds the reference's first weights; None means the model's."""
        self._critic = critic
        self._config, self._policy, self._layout = policy.config, policy, policy.layout
        self._reference, self._reference_folder = reference, reference_folder or model_folder
        self._folder, self._model_folder, self._say = folder, model_folder, say
        self._step = 0  # step that is being dumped; 0: none
        self._updates: list[dict[str, Any]] = []
        self._seen: dict[int, LossInputs] = {}
        self._sources: dict[int, dict[str, Source]] = {}  # of adapters, by id of their model, since the first dump
        self._before: Sampled = {}  # optimizer state before the current optimizer step

    def begin(self, rollouts: TrainedRollouts) -> None:
        """Start a dump if the step is to be dumped."""
        self._step, self._updates = (rollouts.step if rollouts.step in self._config.debug.dump_steps else 0), []
        if self._step:
            cleared = self._attempt(lambda: on_first_rank(self._layout, self._clear))
            adapter = self._config.lora.enabled and self._config.model.reference_path is None
            if cleared and self._reference is not None and (self._reference.moved or adapter):
                with self._reference.in_place():
                    self._attempt(lambda: self._save("reference", self._policy))

    def wrap_loss(self, loss_fn: LossFn) -> LossFn:
        """Return `loss_fn` wrapped to record its inputs in one optimizer step. Weights before it are written now."""
        self._seen = {}
        if not self._step or not (self._attempt(self._save_weights) and self._attempt(self._look_at_optimizer)):
            return loss_fn
        counts = self._layout.tp_rank == 0 and self._layout.cp_rank == 0  # other tp and cp ranks have the same inputs

        def recording(inputs: LossInputs) -> LossOutput:
            # a policy may compute the loss of a part in advance: the last call for a micro-batch is the one that trains
            if counts:
                self._seen[id(inputs.micro_batch)] = detached(inputs)
            return loss_fn(inputs)

        return recording

    def after_update(self, update: Update) -> None:
        """Write the results of the optimizer step."""
        if self._step:
            self._updates[-1] |= {"denominator": update.denominator, "metrics": values_of(update.metrics)}
            self._updates[-1]["samples"] = list(update.batch.samples)
            if self._attempt(self._save_rows):
                self._attempt(self._save_optimizer)

    def after_training(self, rollouts: TrainedRollouts) -> None:
        """Write the rollouts and publish the dump under its final name."""
        if self._step:
            if self._attempt(lambda: self._publish(rollouts)):
                self._say(f"dump {self._final}")
        self._step = 0

    @property
    def _final(self) -> Path:
        return self._folder / f"step_{self._step:06d}"

    @property
    def _critic_folder(self) -> Path:
        path = self._config.algorithm.critic.path
        return self._model_folder if path is None else resolve_model(path, scores=True)

    @property
    def _partial(self) -> Path:
        return self._folder / f".{self._final.name}.partial"

    def _attempt(self, action: Callable[[], Any]) -> bool:
        """Whether a collective action succeeded on every rank. After a failure the step is no longer dumped."""
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            self._say(f"warning: dumping step {self._step} failed; training continues: {error}")
            if self._layout.world_rank == 0:
                remove(self._partial)
            self._step = 0
            return False
        return True

    def _clear(self) -> None:
        remove(self._partial)
        self._partial.mkdir(parents=True)

    def _save_weights(self) -> None:
        number = len(self._updates) + 1
        name = None if self._step == number == 1 and not self._config.lora.enabled else f"weights_{number}"
        if name:
            self._save(name, self._policy)
        self._updates.append({"weights": name})
        if (critic := self._critic) is not None:
            self._save(f"critic_{number}", critic)
            head, file = critic.head_weight()[None], self._partial / f"critic_{number}" / SCORE_FILE
            on_first_rank(self._layout, lambda: save_file({SCORE: head}, file))

    def _save(self, name: str, model: MegatronPolicy) -> None:
        lora, out, layout = self._config.lora, self._partial / name, self._layout
        if not lora.enabled:
            source, size = self._model_folder, None
            if model is self._critic:  # its source may be a reward model, whose files have other tensors
                source, size = self._critic_folder, SHARD_BYTES
            save_hf(model.chunks, model.hf_config, layout, out, source, dtype=model.dtype, max_shard_bytes=size)
            return
        adapters = list(adapter_blocks(model.chunks, model.hf_config, layout))
        sources = self._sources.setdefault(id(model), {}) or find_sources(adapters, layout)
        self._sources[id(model)] = sources
        save_adapter(adapters, layout, sources, out, lora, model.config.model.path, model.dtype)

    def _save_rows(self) -> None:
        """Write the rows of all ranks that compute the loss: those of the last stage, tp and cp rank 0."""
        mine, self._seen = [loss_tokens(inputs) for inputs in self._seen.values()], {}
        name = f"update_{len(self._updates)}.safetensors"
        self._updates[-1]["rows"] = name
        layout = self._layout
        owners = [layout.leader_of(dp_rank, layout.parallel.pp - 1) for dp_rank in range(layout.dp_size)]
        parts = parts_to_first_rank(layout, owners, lambda _: map(save, mine))

        def write() -> None:
            if everyone := [load(part) for part in parts]:
                save_file(merge(everyone), self._partial / name)

        run_own_and_agree(layout, write)

    def _look_at_optimizer(self) -> None:
        config = self._config
        self._before = {}
        if config.train.optimizer == "adam" and not config.model.fp8_param:
            self._before = self._sample(lambda adam, main: [main, *moments_of(adam, main)])
        self._updates[-1]["optimizer_steps"] = self._policy.scheduler.num_steps

    def _save_optimizer(self) -> None:
        """Write samples of the optimizer state. The gradient is clipped as Adam used it; NaN for a skipped step."""
        if not self._before:
            return
        after = self._sample(
            lambda adam, main: [torch.full_like(main, math.nan) if main.grad is None else main.grad, main]
        )
        tables = {f"places.{name}": places for name, (places, _) in after.items()}
        tables |= {
            f"values.{name}": torch.cat([self._before[name][1], values], dim=1) for name, (_, values) in after.items()
        }
        name = f"optimizer_{len(self._updates)}.safetensors"
        self._updates[-1]["optimizer"] = name
        on_first_rank(self._layout, lambda: save_file(tables, self._partial / name))

    def _sample(self, read: Read) -> Sampled:
        policy = self._policy
        return sample(policy.chunks, policy.hf_config, self._layout, policy.optimizer, read)

    def _publish(self, rollouts: TrainedRollouts) -> None:
        """Write what the leaders that sampled the rollouts send to rank 0, one sample at a time, and all the rest."""
        samples, layout = rollouts.samples.every, self._layout
        trajectories = rollouts.samples.trajectories.tolist()

        def parts(index: int) -> Iterator[bytes]:
            scored, trajectory = samples.own[index], trajectories[index]
            yield save(_token_rows(scored, samples.columns.token_advantages))
            of = index if rollouts.samples.columns.roles else trajectory
            text = _sample(scored, rollouts.advantages[of]) | {"trajectory": trajectory}
            if index == trajectory:
                text |= part_columns(scored)
                if (of_turns := rollouts.turn_advantages(trajectory)) is not None:
                    text["turn_advantages"] = of_turns
            yield json.dumps(_plain(text)).encode()

        received = parts_to_first_rank(layout, [layout.leader_of(r) for r in samples.sampled_by.tolist()], parts)

        def write() -> None:
            if pairs := [(load(rows), json.loads(text)) for rows, text in batched(received, 2)]:
                for (_, text), names in zip(pairs, self._save_images(samples.prompts), strict=True):
                    text["images"] = names
                self._write(*zip(*pairs, strict=True))

        run_own_and_agree(layout, write)

    def _save_images(self, prompts: Sequence[Prompt]) -> list[list[str]]:
        """Write the images of prompts, each once, and return the names of each prompt's files in order."""
        names: dict[int, list[str]] = {}
        for inputs in (prompt.inputs for prompt in prompts):
            files = inputs.files() if isinstance(inputs, PromptImages) and id(inputs) not in names else ()
            for content in files:
                name = f"images/{hashlib.blake2b(content, digest_size=16).hexdigest()}"
                (self._partial / "images").mkdir(exist_ok=True)
                (self._partial / name).write_bytes(content)
                names.setdefault(id(inputs), []).append(name)
        return [names.get(id(prompt.inputs), []) for prompt in prompts]

    def _write(self, rows: Sequence[Rows], texts: Sequence[dict[str, Any]]) -> None:
        config, layout = self._config, self._layout
        contents = {
            "step": self._step,
            "dtype": dtype_name(self._policy.dtype),
            "layout": layout.sizes,
            "versions": package_versions(),
            "model": str(self._model_folder.resolve()),
            "reference": "reference"
            if (self._partial / "reference").exists()
            else str(self._reference_folder.resolve()),
            "updates": self._updates,
            "samples": texts,
            "config": config.model_dump(mode="json"),
        }
        if self._critic is not None:
            contents["critic"] = str(self._critic_folder.resolve())
        borders = torch.tensor([0, *(row["token_ids"].numel() for row in rows)]).cumsum(0)
        columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]} | {"borders": borders}
        save_file(columns, self._partial / "samples.safetensors")
        (self._partial / STEP_FILE).write_text(
            json.dumps(_plain(contents), indent=1, ensure_ascii=False, allow_nan=False)
        )
        remove(self._final)  # left by the run before it was resumed from an earlier step
        self._partial.rename(self._final)


def detached(inputs: LossInputs) -> LossInputs:
    """Return the inputs with all tensors detached from the autograd graph; shapes and dtypes stay."""
    rows: dict[str, Any] = {name: value.detach() for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return replace(inputs, **rows, divergences=tuple(row.detach() for row in inputs.divergences))


def loss_tokens(inputs: LossInputs) -> Rows:
    """Return one row per loss token of a micro-batch, in order: tensors [N] on the CPU, in the dtypes of the inputs."""
    batch = inputs.micro_batch
    chosen = batch.loss_mask.cpu().nonzero()[:, 0]
    rows = {
        "sample": batch.samples[batch.sequence_index.cpu()],
        "token": batch.position_ids + 1,
        "token_id": batch.labels,
        "advantage": batch.advantages,
        "policy_logprobs": inputs.policy_logprobs,
        "old_logprobs": batch.terms.old_logprobs,
        "ref_logprobs": batch.terms.ref_logprobs,
        "values": batch.terms.values,
        "returns": batch.terms.returns,
        "rollout_logprobs": batch.rollout_logprobs,
        "entropy": inputs.entropy,
        "full_kl": inputs.full_kl,
    }
    divergences = iter(inputs.divergences)
    for term in batch.terms.teachers:
        row = next(divergences) if term.logprobs is None else term.logprobs
        rows[f"teacher.{term.name}"] = row.where(term.weights.to(row.device) > 0, math.nan)
    return {name: row.cpu().index_select(0, chosen) for name, row in rows.items() if row is not None}


def merge(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of all micro-batches, sorted by sample and token. A token trained twice has two rows."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = (whole["sample"] * 2**32 + whole["token"]).argsort(stable=True)
    return {name: row[order] for name, row in whole.items()}


def _token_rows(scored: ScoredRollout, token_rewards: bool) -> Rows:
    rollout = scored.rollout
    prompt = np.array(rollout.prompt.token_ids, np.int64)
    length, routes = len(prompt) + len(rollout.response_ids), {}
    if rollout.routes is not None:  # the engine has not read the last token
        missing = length - len(rollout.routes)
        routes["routes"] = torch.from_numpy(np.pad(rollout.routes, ((0, missing), (0, 0), (0, 0)), mode="edge"))
    of_tokens = {}
    if token_rewards:
        row = np.full(length, math.nan)
        if scored.parts is not None and scored.parts.tokens:
            row[len(prompt) :] = scored.parts.tokens[0]
        of_tokens["token_rewards"] = torch.from_numpy(row)
    return (
        routes
        | of_tokens
        | {
            "token_ids": torch.from_numpy(np.concatenate([prompt, rollout.response_ids])),
            "prompt_lengths": torch.tensor([len(prompt)]),
            "rollout_logprobs": torch.from_numpy(np.concatenate([np.zeros(len(prompt)), rollout.rollout_logprobs])),
            "written": torch.from_numpy(np.concatenate([np.zeros(len(prompt), bool), rollout.written])),
        }
    )


def _sample(scored: ScoredRollout, advantage: float) -> dict[str, Any]:
    rollout = scored.rollout
    return {
        "prompt_id": rollout.prompt.prompt_id,
        **({"task": rollout.prompt.task} if rollout.prompt.task else {}),
        "prompt": rollout.prompt.messages,
        "opened": rollout.prompt.opened,
        "columns": rollout.prompt.columns,
        "sampling": rollout.prompt.sampling,
        **({} if rollout.prompt.teachers is None else {"teachers": rollout.prompt.teachers}),
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "stop_string": rollout.stop_string,
        "forced": rollout.forced,
        "weight_version": rollout.weight_version,
        "rewards": scored.rewards,
        "reward": scored.reward,
        "advantage": advantage,
        "dialogue": rollout.dialogue and rollout.dialogue.record(),
    }


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Keys, unknown types, NaN and infinities become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
