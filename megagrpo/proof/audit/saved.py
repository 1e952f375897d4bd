"""Reads the files that `records/rows/dump.py` writes; their layout is described there."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.tokens.grammar import Grammars, grammars_of
from megagrpo.data.tokens.sampling import own_sampling, sampling_of
from megagrpo.data.tokens.tokenizer import tokenizer_of
from megagrpo.families.hf_config import load_hf_config
from megagrpo.types import SamplingParams


@dataclass(frozen=True)
class Sample:
    """One response with its prompt: `token_ids` and `rollout_logprobs` [L]. `places` [Lr] locate the policy tokens."""

    token_ids: Tensor
    prompt_length: int
    rollout_logprobs: Tensor
    places: Tensor
    text: dict[str, Any]  # prompt, columns, response, finish_reason, rewards, reward, advantage
    routes: Tensor | None = None  # [L, M, k], with `rollout.routing_replay: engine`
    trajectory: int = 0  # index of the trajectory's first sample, which has its reward and its end
    is_branch: bool = False  # whether it is another sample of the trajectory
    images: tuple[Path, ...] = ()  # the files of the prompt's images, in order
    token_rewards: Tensor | None = None  # [L] with weights, NaN: none; with `advantage_by` token or process

    @property
    def length(self) -> int:
        return self.token_ids.numel()

    @property
    def role(self) -> str:
        """The role whose turns the sample has; "" without roles."""
        return str((self.text["dialogue"] or {}).get("role", ""))

    @property
    def sequence(self) -> tuple[int, str]:
        """The sequence of the loss that the sample belongs to: its trajectory and its role."""
        return self.trajectory, self.role

    @property
    def sampling(self) -> dict[str, Any]:
        """The own sampling parameters of the prompt's row, if any. Older dumps have none."""
        return self.text.get("sampling", {})


@dataclass(frozen=True)
class Sampled:
    """Elements of a trained tensor around an optimizer step, float64 [n] each, at flattened positions `places` [n]."""

    places: Tensor
    weight: Tensor
    first: Tensor  # Adam's moments
    second: Tensor
    gradient: Tensor  # clipped; NaN when the step was skipped
    next_weight: Tensor


@dataclass(frozen=True)
class DumpedUpdate:
    """One optimizer step on the samples with indices `samples`. `rows` holds the loss's inputs, one row per loss token;
    `weights` is the folder of the weights before it."""

    number: int  # from 1
    samples: list[int]
    weights: Path
    denominator: int
    metrics: dict[str, float]
    rows: dict[str, Tensor]
    optimizer: dict[str, Sampled]  # by Hugging Face tensor name; empty if the dump has no sample
    steps_before: int | None = None  # optimizer steps of the run before this one

    def metric(self, name: str) -> float:
        """Return a metric; NaN if the run did not measure it. A skipped step has no gradient norm."""
        return float(self.metrics.get(name, "nan"))


@dataclass(frozen=True)
class Step:
    """One dumped step of a run. `model` is the folder of the run's initial weights, `reference` the folder of the
    reference's weights in this step."""

    folder: Path
    number: int
    config: RunConfig
    dtype: str
    model: Path
    reference: Path
    layout: dict[str, int]
    samples: list[Sample]
    updates: list[DumpedUpdate]
    critic: Path | None = None  # the folder of the critic's first weights

    @property
    def trajectories(self) -> list[Sample]:
        """The first sample of each trajectory."""
        return [sample for sample in self.samples if not sample.is_branch]

    @property
    def samples_in_order(self) -> list[list[int]]:
        """The indices of the samples of each trajectory, in the order of turns: its branches, then its first sample."""
        indices: list[list[int]] = [[] for _ in self.trajectories]
        for index in [*range(len(indices), len(self.samples)), *range(len(indices))]:
            indices[self.samples[index].trajectory].append(index)
        return indices

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs."""
        return grammars_of(self.config, self.model, load_hf_config(self.model).vocab_size)

    @cached_property
    def _sampling(self) -> SamplingParams:
        rollout = self.config.rollout
        has_texts = any(isinstance(token, str) for token in rollout.logit_bias)
        return sampling_of(rollout, tokenizer_of(self.config, self.model) if has_texts else None)

    def sampling_of(self, sample: Sample) -> SamplingParams:
        """Return the parameters that a sample was sampled with. Raises ValueError for texts without a tokenizer."""
        return own_sampling(self._sampling, sample.sampling)

    @cached_property
    def groups(self) -> list[range]:
        """The trajectories of each prompt, in order; the run or the prompt's task says how many."""
        sizes, found, count = self.config.group_sizes, list[range](), len(self.trajectories)
        while (start := found[-1].stop if found else 0) < count:
            found.append(range(start, start + sizes[self.task_of(start)]))
        return found

    @cached_property
    def group_of(self) -> list[int]:
        """The index of each trajectory's group."""
        return [index for index, group in enumerate(self.groups) for _ in group]

    def task_of(self, trajectory: int) -> str:
        """Return the name of a trajectory's task; "" without tasks."""
        return str(self.samples[trajectory].text.get("task", ""))

    def is_masked(self, sample: Sample) -> bool:
        """Whether all tokens of the sample are masked out of the loss."""
        ended = self.samples[sample.trajectory].text["finish_reason"]
        return bool(self.config.algorithm.mask_truncated_completions and ended == "length")

    @property
    def has_roles(self) -> bool:
        """Whether samples have advantages of their roles."""
        return any(sample.role for sample in self.samples)

    def is_frozen(self, sample: Sample) -> bool:
        """Whether the sample's role has weight 0, so that it is in no optimizer step."""
        return bool(sample.role) and not self.roles_of(sample)[sample.role]

    def roles_of(self, sample: Sample) -> dict[str, float]:
        """Return the roles of the sample's task with their weights."""
        task = sample.text.get("task", "")
        return next(each.config.multi_turn.roles for each in self.config.each_task if each.name == task)

    def loss_lengths(self, update: DumpedUpdate) -> dict[tuple[int, str], int]:
        """Return the number of loss tokens of each sequence of an optimizer step: of all samples of a trajectory, or of
        a role in it."""
        lengths = Counter[tuple[int, str]]()
        for sample in map(self.samples.__getitem__, update.samples):
            lengths[sample.sequence] += 0 if self.is_masked(sample) else sample.places.numel()
        return lengths


def load_step(run: Path, step: int, model: Path | None = None) -> Step:
    """Return the dump of one step. `model` overrides the folder of the run's initial model. A reference with its own
    weights must be at its old path.

    Raises ConfigError, naming the dumped steps, when this one does not exist, and when weights that it needs are gone.
    """
    folder = run / "dumps" / f"step_{step:06d}"
    file = folder / "step.json"
    if not file.is_file():
        there = [str(int(p.parent.name.removeprefix("step_"))) for p in sorted(run.glob("dumps/step_*/step.json"))]
        known = ", ".join(there) or "none: set debug.dump_steps"
        raise ConfigError(f"--step: {run} holds no dump of step {step}; it has {known}")
    contents = json.loads(file.read_text())
    first = Path(contents["model"])
    reference, model = folder / contents["reference"], model or first
    reference = model if reference == first else reference
    if not (model / "config.json").is_file():
        why = "holds no config.json; give the folder of the model that the run started from"
        raise ConfigError(f"--model: {model} {why}")
    if not any((reference / name).is_file() for name in ("config.json", "adapter_config.json")):
        fix = "put the weights of model.reference_path back there"
        raise ConfigError(f"{file}: the reference {reference} holds no config.json; {fix}")
    return Step(
        folder=folder,
        number=step,
        config=RunConfig.model_validate(contents["config"]),
        dtype=contents["dtype"],
        model=model,
        reference=reference,
        layout=contents["layout"],
        samples=_samples(folder, load_file(folder / "samples.safetensors"), contents["samples"]),
        updates=[_update(folder, model, number, update) for number, update in enumerate(contents["updates"], 1)],
        critic=Path(contents["critic"]) if "critic" in contents else None,
    )


def _samples(folder: Path, rows: dict[str, Tensor], texts: list[dict[str, Any]]) -> list[Sample]:
    borders, prompts = rows["borders"].tolist(), rows["prompt_lengths"].tolist()
    spans = [slice(start, stop) for start, stop in itertools.pairwise(borders)]
    return [
        Sample(
            rows["token_ids"][span],
            prompt,
            rows["rollout_logprobs"][span],
            rows["written"][span].nonzero()[:, 0],
            text,
            rows["routes"][span] if "routes" in rows else None,
            text.get("trajectory", index),
            text.get("trajectory", index) != index,
            tuple(folder / name for name in text.get("images", ())),
            rows["token_rewards"][span] if "token_rewards" in rows else None,
        )
        for index, (span, prompt, text) in enumerate(zip(spans, prompts, texts, strict=True))
    ]


def _update(folder: Path, model: Path, number: int, saved: dict[str, Any]) -> DumpedUpdate:
    weights = folder / saved["weights"] if saved["weights"] else model
    rows, optimizer = load_file(folder / saved["rows"]), _optimizer(folder, saved)
    taken = saved.get("optimizer_steps")
    return DumpedUpdate(
        number, saved["samples"], weights, saved["denominator"], saved["metrics"], rows, optimizer, taken
    )


def _optimizer(folder: Path, saved: dict[str, Any]) -> dict[str, Sampled]:
    tables = load_file(folder / saved["optimizer"]) if "optimizer" in saved else {}
    names = [key.removeprefix("places.") for key in tables if key.startswith("places.")]
    return {
        name: Sampled(tables[f"places.{name}"], *tables[f"values.{name}"].double().unbind(1)) for name in sorted(names)
    }


def following(step: Step, update: DumpedUpdate) -> DumpedUpdate | None:
    """Return the optimizer step after `update`: in the same dump, or the next step's first one if dumped."""
    if update.number < len(step.updates):
        return step.updates[update.number]
    number = int(step.folder.name.removeprefix("step_")) + 1
    folder = step.folder.with_name(f"step_{number:06d}")
    if not (folder / "step.json").is_file():
        return None
    return _update(folder, step.model, 1, json.loads((folder / "step.json").read_text())["updates"][0])
