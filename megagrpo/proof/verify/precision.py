"""Measures FP8's effect on a run's model by layer, and names the layers that should stay in bf16.

`megagrpo verify CONFIG --precision` computes the same tokens in the run's precision and in its FP8 recipe.
"""

from __future__ import annotations

import contextlib
import json as json_text
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megagrpo.config import ConfigError, RunConfig, io, load_config
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.data.prompts import PromptSource
from megagrpo.data.tokens.tokenizer import tokenizer_of
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.families.weight_sources import resolve_model
from megagrpo.planner.rules.plan_problems import check
from megagrpo.platform import device
from megagrpo.platform.device import quiet
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.platform.parallel.spawn import RankFailed, run_ranks
from megagrpo.platform.process.terminal import show, wrapped
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK
from megagrpo.proof.verify.verified_step import policy_gradient
from megagrpo.train_types import TrainBatch, TrainSample
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.load import load_hf

# relative error of a layer's contribution to the hidden states; on SmolLM2-135M rounding alone is 2 to 13 %
THRESHOLD = 0.2
OF_GRADIENTS = 3.0  # weight gradients may be this many times as far off: more rounded products precede them
# limit of `token_mult_prob_error` if `rollout.mismatch_threshold` is empty, as in NeMo-RL's functional tests
ALLOWED_MISMATCH = 1.05
DEFAULT_TOKENS = 2048
GATE_SECONDS = 3600.0  # limit of a measurement
CONTEXT = 4  # tokens at the start of a text that do not count: predictions there are guesses in any precision
PARTS = ("attention", "mlp")

type Key = tuple[int, str]
"""Decoder layer of the whole model, and its half (see PARTS)."""
type Tape = dict[tuple[str, int, str], list[Tensor]]
"""Quantity and `Key` -> tensors on the host, one per micro-batch in order: the hidden states [rows, 1, H] `before` and
`after` the layer, what its attention or MLP `added`, and the `gradient` of `after`."""
type Sums = dict[tuple[str | int, ...], tuple[float, float]]
"""Quantity, and of a layer its `Key` -> sums of squares over elements: of differences, and of expected values."""


@dataclass(frozen=True)
class LayerError:
    """Relative errors |measured - expected| / |expected| of half a decoder layer, Euclidean norms over the batch.

    `activation` and `gradient` are the layer's own errors: its input hidden states and its output's gradient are those
    of the run's own precision. `drift` is the error of the hidden states after all layers up to this one.
    """

    layer: int
    part: str  # "attention" or "mlp" (or experts)
    activation: float  # error of its contribution to the hidden states
    gradient: float  # error of its weights' gradient; 0 without trained weights
    drift: float


@dataclass(frozen=True)
class PrecisionErrors:
    """Errors of a model in FP8. `layers` is in model order; other fields measure the model without replayed inputs.

    Log-probs are in nats: mean and largest |difference| over `num_tokens`, and the mean of exp |difference|. `gradient`
    is the relative error of all layers' weight gradients together.
    """

    layers: list[LayerError]
    num_tokens: int
    logprob_mean: float
    logprob_max: float
    token_mult_prob_error: float
    gradient: float

    def bad_layers(self, threshold: float) -> list[int]:
        """Return the decoder layers of which one half exceeds the limits."""
        limit = OF_GRADIENTS * threshold
        return sorted({e.layer for e in self.layers if e.activation > threshold or e.gradient > limit})


def _layers_of(chunks: Sequence[nn.Module]) -> dict[Key, nn.Module]:
    """Return this rank's layers of bare chunks. A hybrid layer is half a decoder layer: attention, MLP or experts."""
    layers: list[nn.Module] = [layer for chunk in chunks for layer in attrgetter("decoder.layers")(chunk)]
    numbered: list[tuple[int, nn.Module]] = [(attrgetter("layer_number")(layer) - 1, layer) for layer in layers]
    return {(number // LAYERS_PER_BLOCK, PARTS[number % LAYERS_PER_BLOCK]): layer for number, layer in numbered}


@contextlib.contextmanager
def _recording(chunks: Sequence[nn.Module], like: Tape | None = None) -> Iterator[Tape]:
    """Context manager: record a forward and backward pass of the chunks inside it.

    With `like` each layer gets the hidden states of this tape, and in the backward pass its gradient. The differences
    between the two tapes are then each layer's own; the model's final output is meaningless. Activations must not be
    recomputed, and both passes must run the same micro-batches in the same order.
    """
    tape: Tape = defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for key, layer in _layers_of(chunks).items():
            half = layer.get_submodule("self_attention" if key[1] == "attention" else "mlp")
            before, added, after = _hooks(key, tape, like)
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(half.register_forward_hook(added).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield tape


def _hooks(key: Key, tape: Tape, like: Tape | None) -> tuple[Callable[..., Any], ...]:
    """Return the hooks before a layer, after its attention or MLP, and after the layer."""

    def record(name: str, tensor: Tensor) -> None:
        tape[name, *key].append(tensor.detach().to("cpu", copy=True))

    def before(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = kwargs["hidden_states"]
        if like is not None:
            hidden = _InPlaceOf.apply(hidden, like["before", *key][len(tape["before", *key])].to(hidden))
        record("before", hidden)
        return args, kwargs | {"hidden_states": hidden}

    def added(half: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        record("added", output[0])

    def after(layer: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        index, hidden = len(tape["after", *key]), output[0] if isinstance(output, tuple) else output
        record("after", hidden)
        gradients = tape["gradient", *key]
        gradients.append(torch.empty(0))  # backward passes have another order with pipeline stages

        def took(gradient: Tensor) -> Tensor:
            taken = gradient if like is None else like["gradient", *key][index].to(gradient)
            gradients[index] = taken.detach().to("cpu", copy=True)
            return taken

        if hidden.requires_grad:
            hidden.register_hook(took)

    return before, added, after


class _InPlaceOf(torch.autograd.Function):
    """Replaces a tensor's values; the gradient goes to the replaced tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def batch_of(texts: Iterable[Tensor]) -> list[TrainSample]:
    """Return samples of token ids [L] int64: all tokens after the first few count, with advantages -1 and 1 in turn."""
    samples = []
    for index, ids in enumerate(texts):
        mask = torch.arange(ids.numel()) >= min(CONTEXT, ids.numel() - 1)
        samples.append(TrainSample(ids, mask, torch.zeros(ids.numel()), 1.0 if index % 2 else -1.0, index=index))
    return samples


def measure(
    config: RunConfig, plain: RunConfig, hf_config: HfConfig, folder: Path, samples: Sequence[TrainSample]
) -> PrecisionErrors:
    """Return `config`'s errors against `plain`, the same run without FP8. Weights come from the Hugging Face `folder`.

    Collective over the world, in `config`'s layout, with one result on all ranks. Recompute must be off. Weights stay.
    """
    layout = init_layout(config.parallel, config.run.seed)
    try:
        # padded as FP8 requires
        batch = pack(samples, packing_rules(config, share_prompts=False), layout.dp_rank, layout.dp_size)
        expected, gradients, logprobs = _run(_policy(plain, layout, hf_config, folder), batch)
        policy = _policy(config, layout, hf_config, folder)
        measured, whole_gradients, found_logprobs = _run(policy, batch)
        own, own_gradients, _ = _run(policy, batch, like=expected)
        sums: Sums = {}
        for key, of_layer in gradients.items():
            sums["activation", *key] = _sums(own["added", *key], expected["added", *key])
            sums["gradient", *key] = _sums(own_gradients[key], of_layer)
            sums["drift", *key] = _sums(measured["after", *key], expected["after", *key])
        whole = [_sums(whole_gradients[key], of_layer) for key, of_layer in gradients.items()]
        sums["gradient",] = sum(pair[0] for pair in whole), sum(pair[1] for pair in whole)
        apart = torch.cat([torch.zeros(0), *((f - e).abs() for f, e in zip(found_logprobs, logprobs, strict=True))])
        everyone = layout.all_gather_objects((sums, apart.tolist()))
    finally:
        layout.release()
    return _errors(everyone)


def _policy(config: RunConfig, layout: Layout, hf_config: HfConfig, folder: Path) -> MegatronPolicy:
    policy = MegatronPolicy(config, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    fill_adapters(policy.chunks, hf_config, layout, config.lora, config.run.seed)
    policy.weights_changed()
    return policy


def _run(
    policy: MegatronPolicy, batch: TrainBatch, like: Tape | None = None
) -> tuple[Tape, dict[Key, list[Tensor]], list[Tensor]]:
    """Return (the tape, gradients of each layer's trained weights, this rank's log-probs of tokens that count)."""
    with _recording(policy.chunks, like) as tape:
        policy.backward(batch, policy_gradient, batch.num_tokens)
    gather_gradients(policy.model)
    gradients: dict[Key, list[Tensor]] = {}
    for key, layer in _layers_of(policy.chunks).items():
        trained = [attrgetter("main_grad")(p) for p in layer.parameters() if p.requires_grad]
        gradients[key] = [gradient.detach().to("cpu", torch.float32, copy=True) for gradient in trained]
    rows, layout = policy.logprobs(batch), policy.layout
    if not (layout.is_last_stage and layout.tp_rank == layout.cp_rank == 0):  # the other ranks have the same
        return tape, gradients, []
    pairs = zip(rows, batch.micro_batches, strict=True)
    return tape, gradients, [row.cpu()[m.loss_mask] for row, m in pairs if row is not None]


def _sums(measured: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    difference = total = 0.0
    for value, reference in zip(measured, expected, strict=True):
        difference += (value.double() - reference.double()).square().sum().item()
        total += reference.double().square().sum().item()
    return difference, total


def _errors(everyone: Sequence[tuple[Sums, list[float]]]) -> PrecisionErrors:
    """Merge the ranks' sums. Each rank covers its own layers and its own tokens."""
    merged: defaultdict[tuple[str | int, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sums, _ in everyone:
        for key, pair in sums.items():
            merged[key] = [a + b for a, b in zip(merged[key], pair, strict=True)]
    relative = {key: math.sqrt(difference / total) if total else 0.0 for key, (difference, total) in merged.items()}
    keys = sorted((int(key[1]), str(key[2])) for key in relative if key[0] == "drift")
    layers = [LayerError(*key, *(relative[name, *key] for name in ("activation", "gradient", "drift"))) for key in keys]
    apart = torch.tensor([value for _, values in everyone for value in values], dtype=torch.float64)
    logprobs = (apart.mean().item(), apart.max().item(), apart.exp().mean().item())
    return PrecisionErrors(layers, apart.numel(), *logprobs, relative["gradient",])


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
        why = "none computes nothing in FP8; name a recipe, as in model.fp8_recipe=blockwise"
        raise ConfigError(f"model.fp8_recipe: {why}")
    world = int(ENVIRONMENT.get("WORLD_SIZE", config.parallel.smallest_world))
    if problems := check(config, world).problems:
        raise ConfigError(io.listed(path, problems))
    folder = resolve_model(config.model.path)
    hf_config = load_hf_config(folder)
    samples = batch_of(_texts(config, folder, tokens))
    is_first = ENVIRONMENT.get("RANK", "0") == "0"

    def tell(text: str) -> None:
        if is_first and not json:
            show("\n".join(wrapped(text)))

    tell(_header(config, hf_config, samples))
    errors = _measure(config, hf_config, folder, samples, world)
    tell(_as_text(config, errors, threshold))
    if (bad := errors.bad_layers(threshold)) and fix is not None:
        in_bf16 = sorted({*(layer % hf_config.num_layers for layer in config.model.bf16_layers), *bad})
        fixed = config.model_copy(update=dict(model=config.model.model_copy(update=dict(bf16_layers=in_bf16))))
        if is_first:
            written = f"Written by megagrpo verify --precision: layers that are more than {threshold:g} off in FP8"
            io.save_changes(fixed, load_config(path), path, fix, f"{written} stay in bf16.")
        tell(f"\n{fix}: {path} with {len(in_bf16)} of {hf_config.num_layers} layers in bf16; measured again:")
        config = load_config(fix)
        errors = _measure(config, hf_config, folder, samples, world)
        tell(_as_text(config, errors, threshold))
    passed, bad = _passed(config, errors, threshold), errors.bad_layers(threshold)
    if is_first and json:
        verdict = dict(config=str(path), passed=passed, bad_layers=bad, bf16_layers=config.model.bf16_layers)
        show(json_text.dumps(verdict | asdict(errors), indent=1))
    return 0 if passed else 1


def _passed(config: RunConfig, errors: PrecisionErrors, threshold: float) -> bool:
    return not errors.bad_layers(threshold) and errors.token_mult_prob_error <= _mismatch(config)


def _mismatch(config: RunConfig) -> float:
    """Return the limit of `token_mult_prob_error`."""
    return config.rollout.mismatch_threshold or ALLOWED_MISMATCH


def _texts(config: RunConfig, folder: Path, tokens: int) -> list[Tensor]:
    """Return prompts of the training data, `tokens` tokens in all: text that the model knows, without generation."""
    tokenizer, longest = tokenizer_of(config, folder), config.rollout.max_prompt_length
    try:
        source = PromptSource(config.data.train, config.data, tokenizer, longest, config.run.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    texts: list[Tensor] = []
    while sum(text.numel() for text in texts) < tokens:
        texts += [torch.tensor(prompt.token_ids) for prompt in source.next(1)]
    return texts


def _measure(
    config: RunConfig, hf_config: HfConfig, folder: Path, samples: Sequence[TrainSample], world: int
) -> PrecisionErrors:
    config = config.model_copy(update=dict(model=config.model.model_copy(update=dict(recompute="none"))))
    without_fp8 = config.model.model_copy(update=dict(fp8_recipe="none", bf16_layers=[], fp8_param=False))
    arguments = config, config.model_copy(update=dict(model=without_fp8)), hf_config, folder, samples
    if "WORLD_SIZE" in ENVIRONMENT:
        return measure(*arguments)
    try:
        return run_ranks(measure, world, *arguments, timeout=GATE_SECONDS)[0]
    except RankFailed as error:
        raise ConfigError(f"the run fails in FP8 or without: {error}") from error


def _header(config: RunConfig, hf_config: HfConfig, samples: Sequence[TrainSample]) -> str:
    """Return two lines: the model and the batch that are measured."""
    model, dtype = config.model, str(device.resolve_precision(config.model.precision)).removeprefix("torch.")
    unrounded = f", {len(model.bf16_layers)} kept in {dtype}" if model.bf16_layers else ""
    return (
        f"model   {model.path}: {hf_config.family}, {hf_config.num_layers} layers{unrounded}; "
        f"FP8 {model.fp8_recipe}, {'hybrid' if model.hybrid_fp8 else 'e4m3'}, beside {dtype}\n"
        f"batch   {len(samples)} prompts of data.train, {sum(s.token_ids.numel() for s in samples)} tokens"
    )


def _as_text(config: RunConfig, errors: PrecisionErrors, threshold: float) -> str:
    """Return one line per decoder layer, and the overall errors."""
    bad, by_layer = errors.bad_layers(threshold), {(e.layer, e.part): e for e in errors.layers}
    columns = f"{'activation':>13}{'gradient':>11}" * 2
    lines = ["", f"{'':9}{'attention':^24}{'mlp':^24}", f"  {'layer':>5}{columns}{'drift':>11}"]
    for layer in sorted({e.layer for e in errors.layers}):
        halves = [by_layer[layer, part] for part in PARTS]
        cells = "".join(f"{e.activation:13.1e}{e.gradient:11.1e}" for e in halves)
        lines.append(f"{'!' if layer in bad else ' '} {layer:>5}{cells}{halves[-1].drift:11.1e}")
    verdict = "pass"
    if bad:
        verdict = f"FAIL: layers {', '.join(map(str, bad))} are too far off; --fix FILE keeps them in bf16"
    elif not _passed(config, errors, threshold):
        why = "no layer is too far off, all of them together are"
        verdict = f"FAIL: {why}; another recipe, or more layers in model.bf16_layers"
    return "\n".join(
        [
            *lines,
            f"allowed  {threshold:11.1e}{OF_GRADIENTS * threshold:11.1e}",
            f"log-probs  mean {errors.logprob_mean:.1e}, largest {errors.logprob_max:.1e} of {errors.num_tokens}; "
            f"token_mult_prob_error {errors.token_mult_prob_error:.4f}, {_mismatch(config):g} is allowed",
            f"gradient   of all layers together {errors.gradient:.1e}",
            verdict,
        ]
    )
