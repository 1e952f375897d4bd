"""A trainer that offloads its memory between steps takes the same steps, bit for bit, and leaves nothing on the
device."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoint_now import save_now
from ranks import run_ranks
from tiny_policy import SHAPES, few_samples, tiny_model, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from megagrpo.algorithms.losses import make_loss
from megagrpo.data.packing.sample_packing import pack, packing_rules
from megagrpo.platform.device.tensor_offload import storages
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.fp8.tensor import parts
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.proof.verify.shrink import shrink_model
from megagrpo.proof.verify.verified_step import fill_weights
from megagrpo.records.checkpoints.checkpoint import Checkpointer
from megagrpo.records.checkpoints.run_files import newest_checkpoint
from megagrpo.train_types import TrainState
from megagrpo.trainer.gpu.state_offload import NoOffload, Offload

SHARDED, WHOLE = dict(distributed_optimizer=True), dict(distributed_optimizer=False)
# Name -> ranks, model, layout, further sections of the config.
CASES = {
    "sharded_bf16": (2, "llama_tied", {}, dict(train=SHARDED, model=dict(precision="bf16"))),
    "experts": (2, "qwen3_moe", dict(ep=2), dict(train=SHARDED)),
    "adapters": (1, "qwen3_untied", {}, dict(train=WHOLE, lora=dict(rank=2))),
    "stages": (2, "qwen3_tied", dict(pp=2, vpp=2), dict(train=WHOLE, model=dict(precision="bf16"))),
    "fp8_moments": (2, "llama_tied", {}, dict(train=SHARDED | dict(optimizer_state_dtype="fp8"))),
    "muon": (1, "llama_tied", {}, dict(train=WHOLE | dict(optimizer="muon"))),
    "stored_base": (2, "qwen2_untied", {}, dict(train=SHARDED, lora=dict(rank=2), model=dict(base_storage="nf4"))),
    "weights_in_fp8": (
        2,
        "llama_tied",
        dict(tp=2),
        dict(train=SHARDED, model=dict(precision="bf16", fp8_recipe="tensorwise", fp8_param=True)),
    ),
    "sharded_fp32": (2, "qwen2_untied", dict(tp=2, sequence_parallel=True), dict(train=SHARDED)),
}
USUAL = ("sharded_bf16",)


def alive(but: Sequence[torch.Tensor] = ()) -> int:
    """Bytes of all tensor storages made since `gc.freeze`, except these tensors' and storages exported to NumPy, which
    cannot be freed."""
    gc.collect()
    found, left_out = storages(t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)), storages(but)
    return sum(storage.nbytes() for key, storage in found.items() if key not in left_out and storage.resizable())


def everything(policy: MegatronPolicy, reference: Reference) -> list[torch.Tensor]:
    """Copies of everything that steps change, and of the reference."""
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    masters = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    moments = [t for part in parts for state in part.optimizer.state.values() for t in state.values()]
    weights = [t for chunk in policy.chunks for t in (*chunk.parameters(), *chunk.buffers())]
    return [t.detach().clone() for t in (*weights, *masters, *moments, *reference.weights)]


class BytesTo(TorchDispatchMode):
    """Records the copies into host buffers."""

    def __init__(self, offload: Offload | NoOffload):
        super().__init__()
        self.offload, self.copies = offload, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.copies.append(args[0])
        return function(*args, **kwargs or {})

    @property
    def total(self) -> int:
        host = {piece.untyped_storage()._cdata for piece in pieces_of(self.offload)}
        return sum(copy.nbytes for copy in self.copies if copy.untyped_storage()._cdata in host)


def pieces_of(offload: Offload) -> list[torch.Tensor]:
    return [piece for part in offload._parts for piece in part._host]


def frozen(policy: MegatronPolicy) -> list[torch.Tensor]:
    """The frozen weights of the policy."""
    stored = [b for chunk in policy.chunks for name, b in chunk.named_buffers() if ".stored." in name]
    return stored + [p for chunk in policy.chunks for p in chunk.parameters() if not p.requires_grad]


def _steps(settings, hf_config, layout, folder: Path, offloads: bool) -> tuple[list[torch.Tensor], list[float]]:
    """All numbers after three steps, including log-probs of each, and the share of memory left on the device after
    each. After the second step frozen weights are written; without adapters the reference moves instead. A saved
    checkpoint is loaded after another move of the reference."""
    policy = MegatronPolicy(settings, layout, hf_config)
    fill_weights(policy, hf_config, layout)
    reference = Reference(policy)
    policy.weights_changed()
    offload = Offload(policy, reference) if offloads else NoOffload()
    batch = pack(few_samples(), packing_rules(settings, policy.shares_prompts), layout.dp_rank, layout.dp_size)
    saver = Checkpointer(folder / f"saved{offloads}", layout, policy, 1, folder, reference)
    logprobs, left, lora = [], [], settings.lora.enabled
    once = sum(part.nbytes for w in (*reference.weights, *frozen(policy)) for part in parts(w))

    def leave(written: int) -> None:
        """Offload everything, the weights last; assert that `written` bytes of reference and frozen weights are
        copied."""
        weights = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]
        with BytesTo(offload) as copies:
            offload.load_weights_only()
            held = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(held, weights, strict=True))
            offload.offload_all()
        assert offload.away == offloads
        if offloads:
            assert copies.total == offload.host_bytes - once + written

    for step in range(3):
        logprobs += [rows for rows in policy.logprobs(batch) if rows is not None]
        policy.train_step(reference.annotate(batch), make_loss(settings.algorithm), batch.num_tokens)
        whole = alive() if offloads else 0
        leave(written=[once, 0, 0 if lora else once][step])
        if offloads:
            left.append(alive(pieces_of(offload)) / whole)
        offload.load_all()
        if step == 1:
            for weight in frozen(policy):
                weight.data.copy_(weight.data.roll(1, 0))
            policy.weights_changed()
            if not lora:
                reference.mix_in(0.5)
            save_now(saver, TrainState(step=1))
            if not lora:
                reference.mix_in(0.5)
            leave(written=sum(w.nbytes for w in frozen(policy)) if lora else once)
            offload.load_all()
            saver.load(newest_checkpoint(saver.folder))
    return everything(policy, reference) + logprobs, left


def _compare(case: str, folder: Path) -> list[float]:
    _, model, parallel, sections = CASES[case]
    settings = tiny_run(parallel, **sections | dict(train=sections["train"] | dict(share_prompts=False)))
    wide = settings.lora.enabled or settings.model.fp8_param
    hf_config = shrink_model(SHAPES[model], settings.parallel, unit=64) if wide else tiny_model(model)
    layout = init_layout(settings.parallel)
    (folder / "config.json").write_text("{}")
    expected, _ = _steps(settings, hf_config, layout, folder, offloads=False)
    gc.freeze()
    found, left = _steps(settings, hf_config, layout, folder, offloads=True)
    assert len(found) == len(expected)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))
    return left


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in USUAL else [pytest.mark.full]) for case in CASES]
)
def test_steps_are_the_same_and_nothing_stays_on_the_device(case, tmp_path):
    for left in run_ranks(_compare, CASES[case][0], case, tmp_path):
        assert len(left) == 3 and max(left) < 0.02, left
