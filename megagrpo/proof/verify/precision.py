"""Measures the effect of FP8 on a run's model, layer by layer: the same tokens in the run's own precision and in its
FP8 recipe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from megagrpo.config import RunConfig
from megagrpo.data.packing import pack, packing_rules
from megagrpo.models.bridge.adapter_files import fill_adapters
from megagrpo.models.bridge.load import load_hf
from megagrpo.models.families.hf_config import HfConfig
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.optimizer import gather_gradients
from megagrpo.proof.verify.layer_tape import Key, Tape, layers_of, recording
from megagrpo.proof.verify.verified_step import policy_gradient
from megagrpo.types import TrainBatch, TrainSample

CONTEXT = 4  # tokens at the start of a text that do not count: predictions there are guesses in any precision
Gradients = dict[Key, list[Tensor]]
SumKey = tuple[str] | tuple[str, int, str]  # quantity, and for a single layer its `Key`
Sums = dict[SumKey, tuple[float, float]]  # (sum of squared differences, sum of squared expected values) over elements


@dataclass(frozen=True)
class LayerError:
    """Relative errors |measured - expected| / |expected| of one half of a decoder layer, Euclidean norms over the
    batch.

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
    """Errors of a model in FP8. `layers` is in the model's order; the other fields measure the model as it runs,
    without replayed inputs.

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
    """Return samples of token ids [L] int64: every token after the first few counts, with advantages -1 and 1 in
    turn."""
    samples = []
    for index, ids in enumerate(texts):
        mask = torch.arange(ids.numel()) >= min(CONTEXT, ids.numel() - 1)
        samples.append(TrainSample(ids, mask, torch.zeros(ids.numel()), 1.0 if index % 2 else -1.0, index=index))
    return samples


def measure(
    config: RunConfig, plain: RunConfig, hf_config: HfConfig, folder: Path, samples: Sequence[TrainSample]
) -> PrecisionErrors:
    """Return the errors of `config` against `plain`, the same run without FP8. Weights come from the Hugging Face
    `folder`.

    Collective over the world, in the layout of `config`; every rank gets the same result. Recompute must be off. No
    weight changes.
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
        sums["gradient",] = _sums(
            (w, g) for key in gradients for w, g in zip(whole_gradients[key], gradients[key], strict=True)
        )
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
        """Return (the tape, the gradients of each layer's trained weights, this rank's log-probs of the tokens that
        count)."""
        policy = self.policy
        logprobs: list[Tensor] = []
        with recording(policy.chunks, like) as tape:
            policy.backward(self.batch, policy_gradient, self.batch.num_tokens)
        gather_gradients(policy.model)
        gradients = {
            key: [
                attrgetter("main_grad")(p).detach().to("cpu", torch.float32, copy=True)
                for p in layer.parameters()
                if p.requires_grad
            ]
            for key, layer in layers_of(policy.chunks).items()
        }
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
    return PrecisionErrors(
        layers, apart.numel(), apart.mean().item(), apart.max().item(), apart.exp().mean().item(), relative["gradient",]
    )
