"""Checks if a run may compute in FP8, and which layers should stay in bf16: `megagrpo verify CONFIG --precision`."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.config import ConfigError, RunConfig, io, load_config
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import tokenizer_of
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.planner.rules.plan_problems import check
from megagrpo.platform import device
from megagrpo.platform.device import quiet
from megagrpo.platform.parallel.spawn import RankFailed, run_ranks
from megagrpo.platform.process.terminal import show, wrapped
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.proof.verify.precision import PARTS, PrecisionErrors, batch_of, measure
from megagrpo.train_types import TrainSample

# relative error of a layer's contribution to the hidden states; on SmolLM2-135M rounding alone is 2 to 13 %
THRESHOLD = 0.2
OF_GRADIENTS = 3.0  # weight gradients may be this many times as far off: more rounded products precede them
# limit of `token_mult_prob_error` if `rollout.mismatch_threshold` is empty, as in NeMo-RL's functional tests
ALLOWED_MISMATCH = 1.05
DEFAULT_TOKENS = 2048
GATE_SECONDS = 3600.0  # seconds


@dataclass(frozen=True)
class PrecisionVerdict:
    """The result for a config in FP8. `mismatch` is the limit of `token_mult_prob_error`."""

    config: RunConfig
    errors: PrecisionErrors
    threshold: float
    mismatch: float

    @property
    def bad_layers(self) -> list[int]:
        """Decoder layers of which one half exceeds the limits."""
        t = self.threshold
        return sorted({e.layer for e in self.errors.layers if e.activation > t or e.gradient > OF_GRADIENTS * t})

    @property
    def passed(self) -> bool:
        return not self.bad_layers and self.errors.token_mult_prob_error <= self.mismatch


def verify_precision(
    path: Path,
    overrides: Sequence[str],
    threshold: float = THRESHOLD,
    tokens: int = DEFAULT_TOKENS,
    fix: Path | None = None,
    json: bool = False,
) -> int:
    """Return 0 when log-probs and all layers are close enough to the run's own precision, 1 when not. Raises
    ConfigError when it cannot be tried.

    `fix` is a config file in which the bad layers stay in bf16. That config is measured too, and its result decides.
    """
    quiet()
    config = load_config(path, overrides)
    if config.model.fp8_recipe == "none":
        raise ConfigError(
            "model.fp8_recipe: none computes nothing in FP8; name a recipe, as in model.fp8_recipe=blockwise"
        )
    world = int(ENVIRONMENT.get("WORLD_SIZE", config.parallel.smallest_world))
    if problems := check(config, world).problems:
        raise ConfigError(io.listed(path, problems))
    folder = resolve_model(config.model.path)
    hf_config = load_hf_config(folder)
    samples = batch_of(_texts(config, folder, tokens))
    is_first = ENVIRONMENT.get("RANK", "0") == "0"

    def judge(config: RunConfig) -> PrecisionVerdict:
        errors = _measure(config, hf_config, folder, samples, world)
        return PrecisionVerdict(config, errors, threshold, config.rollout.mismatch_threshold or ALLOWED_MISMATCH)

    def tell(text: str) -> None:
        if is_first and not json:
            show("\n".join(wrapped(text)))

    tell(header(config, hf_config, samples))
    verdict = judge(config)
    tell(as_text(verdict))
    if verdict.bad_layers and fix is not None:
        in_bf16 = sorted({*(layer % hf_config.num_layers for layer in config.model.bf16_layers), *verdict.bad_layers})
        fixed = config.model_copy(update=dict(model=config.model.model_copy(update=dict(bf16_layers=in_bf16))))
        if is_first:
            written = f"Written by megagrpo verify --precision: layers that are more than {threshold:g} off in FP8"
            comment = f"{written} stay in bf16."
            io.save_changes(fixed, load_config(path), path, fix, comment)
        tell(f"\n{fix}: {path} with {len(in_bf16)} of {hf_config.num_layers} layers in bf16; measured again:")
        verdict = judge(load_config(fix))
        tell(as_text(verdict))
    if is_first and json:
        show(as_json(path, verdict))
    return 0 if verdict.passed else 1


def _texts(config: RunConfig, folder: Path, tokens: int) -> list[Tensor]:
    """Return prompts of the training data, `tokens` tokens in all: text that the model knows, without generation."""
    tokenizer = tokenizer_of(config, folder)
    try:
        source = PromptSource(
            config.data.train, config.data, tokenizer, config.rollout.max_prompt_length, config.run.seed
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    texts, total = [], 0
    while total < tokens:
        (prompt,) = source.next(1)
        texts.append(torch.tensor(prompt.token_ids))
        total += len(prompt.token_ids)
    return texts


def _measure(
    config: RunConfig, hf_config: HfConfig, folder: Path, samples: Sequence[TrainSample], world: int
) -> PrecisionErrors:
    config = config.model_copy(update=dict(model=config.model.model_copy(update=dict(recompute="none"))))
    without_fp8 = config.model.model_copy(update=dict(fp8_recipe="none", bf16_layers=[], fp8_param=False))
    plain = config.model_copy(update=dict(model=without_fp8))
    if "WORLD_SIZE" in ENVIRONMENT:
        return measure(config, plain, hf_config, folder, samples)
    try:
        return run_ranks(measure, world, config, plain, hf_config, folder, samples, timeout=GATE_SECONDS)[0]
    except RankFailed as error:
        raise ConfigError(f"the run fails in FP8 or without: {error}") from error


def header(config: RunConfig, hf_config: HfConfig, samples: Sequence[TrainSample]) -> str:
    """Return two lines: the model and the batch that are measured."""
    model, dtype = config.model, str(device.resolve_precision(config.model.precision)).removeprefix("torch.")
    unrounded = f", {len(model.bf16_layers)} kept in {dtype}" if model.bf16_layers else ""
    return (
        f"model   {model.path}: {hf_config.family}, {hf_config.num_layers} layers{unrounded}; "
        f"FP8 {model.fp8_recipe}, {'hybrid' if model.hybrid_fp8 else 'e4m3'}, beside {dtype}\n"
        f"batch   {len(samples)} prompts of data.train, {sum(s.token_ids.numel() for s in samples)} tokens"
    )


def as_text(verdict: PrecisionVerdict) -> str:
    """Return one line per decoder layer, and the overall errors."""
    errors, limit = verdict.errors, verdict.threshold
    lines = [
        "",
        f"{'':9}{'attention':^24}{'mlp':^24}",
        f"  {'layer':>5}" + f"{'activation':>13}{'gradient':>11}" * 2 + f"{'drift':>11}",
    ]
    by_layer = {(e.layer, e.part): e for e in errors.layers}
    for layer in sorted({e.layer for e in errors.layers}):
        halves = [by_layer[layer, part] for part in PARTS]
        mark = "!" if layer in verdict.bad_layers else " "
        cells = "".join(f"{e.activation:13.1e}{e.gradient:11.1e}" for e in halves)
        lines.append(f"{mark} {layer:>5}{cells}{halves[-1].drift:11.1e}")
    lines += [
        f"allowed  {limit:11.1e}{OF_GRADIENTS * limit:11.1e}",
        f"log-probs  mean {errors.logprob_mean:.1e}, largest {errors.logprob_max:.1e} of {errors.num_tokens}; "
        f"token_mult_prob_error {errors.token_mult_prob_error:.4f}, {verdict.mismatch:g} is allowed",
        f"gradient   of all layers together {errors.gradient:.1e}",
    ]
    if verdict.bad_layers:
        layers = ", ".join(map(str, verdict.bad_layers))
        lines.append(f"FAIL: layers {layers} are too far off; --fix FILE keeps them in bf16")
    elif not verdict.passed:
        why = "no layer is too far off, all of them together are"
        lines.append(f"FAIL: {why}; another recipe, or more layers in model.bf16_layers")
    else:
        lines.append("pass")
    return "\n".join(lines)


def as_json(path: Path, verdict: PrecisionVerdict) -> str:
    """Return one JSON object: all measurements, and the config's layers in bf16."""
    values = dict(config=str(path), passed=verdict.passed, bad_layers=verdict.bad_layers)
    values |= dict(bf16_layers=verdict.config.model.bf16_layers)
    return json_text.dumps(values | asdict(verdict.errors), indent=1)
