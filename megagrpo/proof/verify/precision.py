"""Measures FP8's effect on a run's model by layer: the same tokens in the run's precision and in its FP8 recipe."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer.policy_optimizer import gather_gradients
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK
from megagrpo.proof.verify.verified_step import policy_gradient
from megagrpo.train_types import TrainBatch, TrainSample
from megagrpo.weights.bridge.adapter_files import fill_adapters
from megagrpo.weights.bridge.load import load_hf

Key = tuple[int, str]  # decoder layer of the whole model, and its half (see PARTS)
PARTS = ("attention", "mlp")


@dataclass
class Crossings:
    """The tensors of one layer, on the host, one per micro-batch in order.

    `before` and `after` are the hidden states [rows, 1, H] around the layer. `added` is the output of its attention or
    MLP. `gradient` is the gradient of `after`.
    """

    before: list[Tensor] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    gradient: dict[int, Tensor] = field(default_factory=dict)


Tape = dict[Key, Crossings]


def layers_of(chunks: Sequence[nn.Module]) -> dict[Key, nn.Module]:
    """Return this rank's layers of bare chunks. A hybrid layer is half a decoder layer: attention, MLP or experts."""
    layers: list[nn.Module] = [layer for chunk in chunks for layer in attrgetter("decoder.layers")(chunk)]
    numbered: list[tuple[int, nn.Module]] = [(attrgetter("layer_number")(layer) - 1, layer) for layer in layers]
    return {(number // LAYERS_PER_BLOCK, PARTS[number % LAYERS_PER_BLOCK]): layer for number, layer in numbered}


@contextlib.contextmanager
def recording(chunks: Sequence[nn.Module], like: Tape | None = None) -> Iterator[Tape]:
    """Context manager: record a forward and backward pass of the chunks inside it.

    With `like` each layer gets the hidden states of this tape, and in the backward pass its gradient. The differences
    between the two tapes are then each layer's own; the model's final output is meaningless. Activations must not be
    recomputed, and both passes must run the same micro-batches in the same order.
    """
    tape: Tape = defaultdict(Crossings)
    with contextlib.ExitStack() as hooks:
        for key, layer in layers_of(chunks).items():
            before, added, after = _hooks(tape[key], None if like is None else like[key])
            half = layer.get_submodule("self_attention" if key[1] == "attention" else "mlp")
            hooks.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(half.register_forward_hook(added).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield tape


def _hooks(
    crossings: Crossings, like: Crossings | None
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks before a layer, after its attention or MLP, and after the layer."""

    def before(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = kwargs["hidden_states"]
        if like is not None:
            hidden = _InPlaceOf.apply(hidden, like.before[len(crossings.before)].to(hidden))
        crossings.before.append(_on_host(hidden))
        return args, kwargs | {"hidden_states": hidden}

    def added(half: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        crossings.added.append(_on_host(output[0]))

    def after(layer: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        index, hidden = len(crossings.after), output[0] if isinstance(output, tuple) else output
        crossings.after.append(_on_host(hidden))

        def took(gradient: Tensor) -> Tensor:
            taken = gradient if like is None else like.gradient[index].to(gradient)
            crossings.gradient[index] = _on_host(taken)
            return taken

        if hidden.requires_grad:
            hidden.register_hook(took)

    return before, added, after


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _InPlaceOf(torch.autograd.Function):
    """Replaces a tensor's values; the gradient goes to the replaced tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


CONTEXT = 4  # tokens at the start of a text that do not count: predictions there are guesses in any precision
Gradients = dict[Key, list[Tensor]]
SumKey = tuple[str] | tuple[str, int, str]  # quantity, and for a single layer its `Key`
Sums = dict[SumKey, tuple[float, float]]  # (sum of squared differences, sum of squared expected values) over elements


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
        expected, gradients, logprobs = _Passes(plain, layout, hf_config, folder, batch).run()
        passes = _Passes(config, layout, hf_config, folder, batch)
        passes.run()  # delayed scales have then seen the batch
        measured, whole_gradients, found_logprobs = passes.run()
        own, own_gradients, _ = passes.run(like=expected)
        sums = _tensor_sums("activation", own, expected, "added") | _tensor_sums("drift", measured, expected, "after")
        sums |= {("gradient", *key): _sums(zip(own_gradients[key], gradients[key], strict=True)) for key in gradients}
        pairs = (pair for key in gradients for pair in zip(whole_gradients[key], gradients[key], strict=True))
        sums["gradient",] = _sums(pairs)
        apart = torch.cat([torch.zeros(0), *((f - e).abs() for f, e in zip(found_logprobs, logprobs, strict=True))])
        everyone = layout.all_gather_objects((sums, apart.tolist()))
    finally:
        layout.release()
    return _errors(everyone)


class _Passes:
    """One policy, and forward and backward passes of the batch through it."""

    def __init__(self, config: RunConfig, layout: Layout, hf_config: HfConfig, folder: Path, batch: TrainBatch):
        self.layout, self.batch, self.policy = layout, batch, MegatronPolicy(config, layout, hf_config)
        load_hf(self.policy.chunks, hf_config, folder, layout)
        fill_adapters(self.policy.chunks, hf_config, layout, config.lora, config.run.seed)
        self.policy.weights_changed()

    def run(self, like: Tape | None = None) -> tuple[Tape, Gradients, list[Tensor]]:
        """Return (the tape, gradients of each layer's trained weights, this rank's log-probs of tokens that count)."""
        policy = self.policy
        logprobs: list[Tensor] = []
        with recording(policy.chunks, like) as tape:
            policy.backward(self.batch, policy_gradient, self.batch.num_tokens)
        gather_gradients(policy.model)
        gradients: Gradients = {}
        for key, layer in layers_of(policy.chunks).items():
            trained = [attrgetter("main_grad")(p) for p in layer.parameters() if p.requires_grad]
            gradients[key] = [gradient.detach().to("cpu", torch.float32, copy=True) for gradient in trained]
        rows = policy.logprobs(self.batch)
        # the other ranks have the same
        if self.layout.is_last_stage and self.layout.tp_rank == self.layout.cp_rank == 0:
            pairs = zip(rows, self.batch.micro_batches, strict=True)
            logprobs = [r.cpu()[m.loss_mask] for r, m in pairs if r is not None]
        return tape, gradients, logprobs


def _tensor_sums(name: str, measured: Tape, expected: Tape, what: str) -> Sums:
    return {
        (name, *key): _sums(zip(getattr(measured[key], what), getattr(expected[key], what), strict=True))
        for key in expected
    }


def _sums(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    difference = total = 0.0
    for value, expected in pairs:
        difference += (value.double() - expected.double()).square().sum().item()
        total += expected.double().square().sum().item()
    return difference, total


def _errors(everyone: Sequence[tuple[Sums, list[float]]]) -> PrecisionErrors:
    """Merge the ranks' sums. Each rank covers its own layers and its own tokens."""
    merged: defaultdict[SumKey, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sums, _ in everyone:
        for key, pair in sums.items():
            merged[key] = [a + b for a, b in zip(merged[key], pair, strict=True)]
    relative = {key: math.sqrt(difference / total) if total else 0.0 for key, (difference, total) in merged.items()}
    keys = sorted((key[1], key[2]) for key in relative if len(key) == 3 and key[0] == "drift")
    layers = [LayerError(*key, *(relative[name, *key] for name in ("activation", "gradient", "drift"))) for key in keys]
    apart = torch.tensor([value for _, values in everyone for value in values], dtype=torch.float64)
    logprobs = (apart.mean().item(), apart.max().item(), apart.exp().mean().item())
    return PrecisionErrors(layers, apart.numel(), *logprobs, relative["gradient",])
