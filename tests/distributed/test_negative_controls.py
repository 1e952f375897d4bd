"""Silent faults known from Megatron-based trainers, injected one at a time: the parity matrix and `megagrpo verify`
detect each one."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from layouts import AXES, config_of, ranks
from ranks import run_ranks
from tiny_policy import SHAPES, few_samples, tiny_model

from megagrpo.config import RunConfig, save_config
from megagrpo.data.packing import sample_packing as packing
from megagrpo.policy import build
from megagrpo.policy.attention import context_parallel
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.transformer import specs
from megagrpo.proof.verify import layouts as verify_module
from megagrpo.proof.verify import verified_step
from megagrpo.proof.verify.shrink import VOCABULARY, plainly
from megagrpo.proof.verify.verified_step import take_step
from megagrpo.proof.verify.verify_compare import compare
from megagrpo.train_types import TrainSample


def batched_messages_between_two_stages(patch):
    """megatron-core's default swaps two messages to the same peer."""
    stock = build.transformer_config

    def config(*args, **kwargs):
        made = stock(*args, **kwargs)
        made.batch_p2p_comm, made.overlap_p2p_comm = True, False
        return made

    patch.setattr(build, "transformer_config", config)


def norms_that_keep_their_part_of_the_gradient(patch):
    """Without the attribute, no all-reduce adds up the gradients of the ranks' parts of the sequence."""
    stock = specs.RMSNorm.__init__

    def init(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    patch.setattr(specs.RMSNorm, "__init__", init)


def keys_in_the_order_of_the_ranks(patch):
    """A rank holds an early and a late chunk of each sequence; gathered keys must be put back in order."""
    patch.setattr(context_parallel, "gathered_indices", lambda cu_seqlens, cp_size: torch.arange(int(cu_seqlens[-1])))


def labels_rolled_after_the_split(patch):
    """The label of a chunk's last token belongs to another rank."""
    stock = MegatronPolicy._loss_inputs

    def loss_inputs(self, hidden, item, *args):
        micro_batch, indices = item.micro_batch, item.indices
        rolled = micro_batch.labels.index_copy(0, indices, micro_batch.token_ids[indices].roll(-1))
        return stock(self, hidden, replace(item, micro_batch=replace(micro_batch, labels=rolled)), *args)

    patch.setattr(MegatronPolicy, "_loss_inputs", loss_inputs)


def sequences_that_begin_one_token_late(patch):
    """Off by one in the borders of a pack: a token attends to the previous sample."""
    stock = packing.build_micro_batch

    def build_micro_batch(*args):
        made = stock(*args)
        borders = made.cu_seqlens.clone()
        borders[1:-1] += 1
        return replace(made, cu_seqlens=borders)

    patch.setattr(packing, "build_micro_batch", build_micro_batch)


def average_of_local_means(patch):
    """Each data-parallel rank divides by its own token count."""

    def denominator(batch, average, max_completion_length):
        return sum(int(m.loss_mask.sum()) for m in batch.micro_batches) * dist.get_world_size()

    patch.setattr(verified_step, "denominator", denominator)


def tied_embeddings_that_never_meet(patch):
    """The first and the last stage each use their own part of the gradient."""
    # its name is also that of a function
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    patch.setattr(module, "_allreduce_word_embedding_grads", lambda *args, **kwargs: None)


def padding_that_takes_probability(patch):
    """The rows that pad the vocabulary count as tokens."""
    stock = MegatronPolicy._head_task
    patch.setattr(MegatronPolicy, "_head_task", lambda *args: replace(stock(*args), vocab_size=None))


def expert_gradients_times_ranks(patch):
    """The experts' gradients are scaled as if every rank held them."""
    stock = MegatronPolicy._finalize_gradients

    def finalize(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        for parameter in [p for chunk in self.chunks for p in chunk.parameters()]:
            if not getattr(parameter, "allreduce", True):
                parameter.main_grad.mul_(self.layout.world_size)

    patch.setattr(MegatronPolicy, "_finalize_gradients", finalize)


def dropout(patch):
    """No fault: every layer drops a tenth of its output, so that random numbers matter."""
    stock = build.transformer_config
    patch.setattr(build, "transformer_config", lambda *args, **kwargs: _with_dropout(stock(*args, **kwargs)))


def _with_dropout(config):
    config.hidden_dropout = 0.1
    return config


def generators_that_are_never_restored(patch):
    """Recomputation in the backward pass draws other random numbers than the forward pass."""
    from megatron.core.tensor_parallel import random

    patch.setattr(random, "_set_all_rng_states", lambda *states: None)


def samples_of_one_length() -> list[TrainSample]:
    """Micro-batches of three samples each have one length: another message of that length fits and nothing crashes."""
    generator, mask = torch.Generator().manual_seed(3), torch.arange(21) >= 9
    samples = []
    for i in range(12):
        logprobs = torch.where(mask, -4.5 + 0.1 * torch.randn(21, generator=generator), 0.0)
        samples.append(
            TrainSample(torch.randint(0, VOCABULARY, (21,), generator=generator), mask, logprobs, advantage=1.0 - i / 7)
        )
    return samples


@dataclass(frozen=True)
class Control:
    plant: Callable[[pytest.MonkeyPatch], None]
    seen_in: str  # kind of the quantity that must be far off
    options: dict
    before: Callable[[pytest.MonkeyPatch], None] | None = None  # set-up that makes the fault visible
    samples: Callable[[], list[TrainSample]] = few_samples

    def __str__(self) -> str:
        return self.plant.__name__

    @property
    def row(self) -> dict:
        return {axis: values[0] for axis, values in AXES.items()} | dict(share_prompts=False) | self.options


CONTROLS = [
    Control(batched_messages_between_two_stages, "loss", dict(pp=2, vpp=2), samples=samples_of_one_length),
    Control(norms_that_keep_their_part_of_the_gradient, "gradient", dict(tp=2, sequence_parallel=True)),
    Control(keys_in_the_order_of_the_ranks, "log-prob", dict(cp=2)),
    Control(labels_rolled_after_the_split, "log-prob", dict(cp=2)),
    Control(sequences_that_begin_one_token_late, "log-prob", dict(dp=2)),
    Control(average_of_local_means, "loss", dict(dp=2, loss="dapo_full_forward")),
    Control(tied_embeddings_that_never_meet, "gradient", dict(pp=2)),
    Control(padding_that_takes_probability, "log-prob", dict(tp=2)),
    Control(expert_gradients_times_ranks, "gradient", dict(model="qwen3_moe", dp=2, ep=2)),
    Control(generators_that_are_never_restored, "gradient", dict(recompute="full"), before=dropout),
]


def take(control: Control, config: RunConfig, n: int):
    return run_ranks(take_step, n, config, tiny_model(control.row["model"]), control.samples())[0]


def verify(row: dict, folder) -> dict:
    """The findings of `megagrpo verify` for a run with this layout."""
    (folder / "config.json").write_text(json.dumps(SHAPES[row["model"]]))
    config = config_of(row)
    config = config.model_copy(update=dict(model=config.model.model_copy(update=dict(path=str(folder)))))
    save_config(config, folder / "run.yaml")
    return verify_module.verify_layouts(folder / "run.yaml", [], ranks=ranks(row))[0]


# One fault of the loss; `make test-full` runs the others.
USUAL = (average_of_local_means,)


@pytest.mark.parametrize(
    "control", [pytest.param(c, marks=() if c.plant in USUAL else pytest.mark.full) for c in CONTROLS], ids=str
)
def test_a_planted_fault_is_seen(control, tmp_path, monkeypatch):
    config, n = config_of(control.row), ranks(control.row)
    if control.before:
        control.before(monkeypatch)
    expected = take(control, plainly(config), 1)
    assert all(d.passed for d in compare(take(control, config, n), expected))
    control.plant(monkeypatch)
    assert control.seen_in in {d.kind for d in compare(take(control, config, n), expected) if d.excess > 100}
    monkeypatch.setattr(verify_module, "random_samples", control.samples)
    found = verify(control.row, tmp_path)
    assert not found["passed"] and not found["worst"][control.seen_in]["passed"]
