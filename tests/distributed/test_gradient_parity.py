"""Loss, every gradient tensor and the next weights of each parallel layout equal those of one process."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megagrpo.algorithms.losses import denominator, make_loss
from megagrpo.bridge.families import blocks
from megagrpo.bridge.load import load_hf
from megagrpo.config import RunConfig
from megagrpo.data.packing import PackingRules, pack
from megagrpo.parallel.layout import init_layout
from megagrpo.policy.hf_config import load_hf_config
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.reference import Reference
from megagrpo.types import TrainSample

SIZES = dict(
    hidden_size=96,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=6,
    intermediate_size=96,
    vocab_size=101,  # not a multiple of 2 or 3: the padded vocabulary is exercised
    max_position_embeddings=128,
    initializer_range=0.1,
)


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    parallel: dict
    model: dict | None = None
    train: dict | None = None
    share_prompts: bool = False

    def __str__(self):
        return self.name


LAYOUTS = [
    Case("tp2", 2, dict(tp=2)),
    Case("tp3", 3, dict(tp=3)),
    Case("pp2", 2, dict(pp=2)),
    Case("dp2", 2, dict()),
    Case("tp2_pp2", 4, dict(tp=2, pp=2)),
    Case("tp2_sequence_parallel", 2, dict(tp=2, sequence_parallel=True)),
    Case("pp2_vpp2", 2, dict(pp=2, vpp=2)),
    Case("tp2_dp2", 4, dict(tp=2)),
    Case("full_recompute", 1, dict(), model=dict(recompute="full")),
    Case("selective_recompute", 1, dict(), model=dict(recompute="selective")),
    Case("small_micro_batches", 1, dict(), train=dict(max_tokens_per_micro_batch=40)),
    Case("shared_prompts", 1, dict(), share_prompts=True),
    Case("shared_prompts_tp2_sequence_parallel", 2, dict(tp=2, sequence_parallel=True), share_prompts=True),
    Case("shared_prompts_pp2", 2, dict(pp=2), share_prompts=True),
    Case("shared_prompts_recompute", 1, dict(), model=dict(recompute="full"), share_prompts=True),
]


def hf_folder(family: str, folder: Path) -> Path:
    """A random tiny checkpoint of one family, made by transformers."""
    import transformers

    torch.manual_seed(0)
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    }
    model = transformers.AutoModelForCausalLM.from_config(configs[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(12):
        if i % 3 == 0:  # groups of three responses to one prompt
            prompt = torch.randint(0, SIZES["vocab_size"], (3 + i,), generator=generator)
        response = torch.randint(0, SIZES["vocab_size"], (2 + (5 * i) % 11,), generator=generator)
        ids = torch.cat([prompt, response])
        mask = torch.arange(ids.numel()) >= prompt.numel()
        logprobs = torch.where(mask, -4.5 + torch.randn(ids.numel(), generator=generator) * 0.1, 0.0)
        made.append(TrainSample(ids, mask, logprobs, advantage=float(torch.randn((), generator=generator)) if i % 5 else 0.0))
    return made


def config(case: Case, **algorithm) -> RunConfig:
    return RunConfig.model_validate(
        dict(
            model=dict(path="x", precision="fp32") | (case.model or {}),
            parallel=case.parallel,
            algorithm=dict(loss_type="grpo", beta=0.1) | algorithm,
            rollout=dict(temperature=0.8, max_prompt_length=16, max_completion_length=16),
            data=dict(train=dict(source="x")),
            rewards=dict(functions=[dict(function="exact_number")]),
            train=dict(
                learning_rate=1e-2,
                adam_epsilon=1e-3,  # AdamW's first step is the gradient's sign otherwise, and turns rounding of zeros into whole steps
                max_grad_norm=0.0,
                distributed_optimizer=False,
                max_tokens_per_micro_batch=128,
                logprob_chunk=16,
            )
            | (case.train or {}),
        )
    )


def one_step(case: Case, folder: str, distributed_optimizer: bool) -> dict:
    """Loss and metrics of one GRPO step, every gradient and every next weight as full Hugging Face tensors, on rank 0."""
    settings = config(case, num_iterations=2)
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"distributed_optimizer": distributed_optimizer})})
    layout = init_layout(settings.parallel)
    hf_config = load_hf_config(folder)
    policy = MegatronPolicy(settings, layout, hf_config)
    load_hf(policy.chunks, hf_config, folder, layout)
    reference = Reference(policy)
    _perturb(policy)
    policy.weights_changed()
    parallel = settings.parallel
    rules = PackingRules(
        max_tokens=settings.train.max_tokens_per_micro_batch,
        at_least=parallel.pp,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
        align=parallel.tp if parallel.sequence_parallel else 1,
        share_prompts=case.share_prompts,
    )
    batch = pack(samples(), rules, layout.dp_rank, layout.dp_size)
    batch = batch.with_logprobs(old=[_old_logprobs(m) for m in batch.micro_batches], ref=reference.logprobs(batch))
    divisor = denominator(batch, settings.algorithm.loss_type, settings.rollout.max_completion_length)
    metrics = policy.train_step(batch, make_loss(settings), divisor)
    gradients = _full_tensors(policy, hf_config, layout, lambda p: p.main_grad) if not distributed_optimizer else {}
    weights = _full_tensors(policy, hf_config, layout, lambda p: p.data)
    layout.close()
    return {"metrics": metrics, "gradients": gradients, "weights": weights}


def _old_logprobs(micro_batch) -> torch.Tensor:
    """Old log-probs [T] that clip some tokens and do not depend on where a token was packed."""
    noise = torch.sin(micro_batch.position_ids.float() + micro_batch.labels.float())
    return torch.where(micro_batch.loss_mask, -4.6 + 0.3 * noise, 0.0)


@torch.no_grad()
def _perturb(policy) -> None:
    """Move the policy away from the reference: a function of each weight alone, so that every layout moves alike."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.add_(0.02 * torch.sin(40 * parameter))


def _full_tensors(policy, hf_config, layout, part) -> dict[str, torch.Tensor]:
    """Full Hugging Face tensors on rank 0, put together from every rank's blocks; replicas must agree."""
    mine = []
    for _, parameter, found in blocks(policy.chunks, hf_config, layout):
        tensor = part(parameter).detach().float()
        mine += [(b.name, b.shape, b.dim, b.start, b.stop, b.view(tensor).reshape(b.block_shape).clone()) for b in found]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full = {}
    for name, shape, dim, start, stop, value in [piece for rank in everyone for piece in rank]:
        target = full.setdefault(name, torch.full(shape, torch.nan))
        place = target.narrow(dim, start, stop - start)
        if not place.isnan().any():
            torch.testing.assert_close(place, value, rtol=0, atol=0, msg=f"replicas of {name} differ")
        place.copy_(value)
    assert not any(t.isnan().any() for t in full.values())
    return full


def _save_step(case: Case, folder: str, distributed_optimizer: bool, out: str) -> None:
    result = one_step(case, folder, distributed_optimizer)
    if os.environ["RANK"] == "0":
        torch.save(result, out)


def _run(case: Case, folder: Path, out: Path, distributed_optimizer: bool = False) -> dict:
    run_ranks(_save_step, case.ranks, case, str(folder), distributed_optimizer, str(out))
    return torch.load(out)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def one_process(request, tmp_path_factory):
    folder = hf_folder(request.param, tmp_path_factory.mktemp(request.param))
    return folder, _run(Case("one process", 1, {}), folder, folder / "one_process.pt")


def relative_errors(found: dict, expected: dict) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: ((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_gradient_and_next_weight_equals_one_process(one_process, case, tmp_path):
    folder, expected = one_process
    assert all(g.norm() > 0 for g in expected["gradients"].values())
    found = _run(case, folder, tmp_path / "found.pt")
    errors = relative_errors(found["gradients"], expected["gradients"])
    worst = max(errors, key=errors.get)
    assert errors[worst] < 1e-5, f"{worst}: {errors[worst]:.1e}"
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    weight_errors = relative_errors(found["weights"], expected["weights"])
    assert max(weight_errors.values()) < 1e-5


@pytest.mark.parametrize("case", [LAYOUTS[3], LAYOUTS[7]], ids=str)
def test_the_distributed_optimizer_takes_the_same_step(one_process, case, tmp_path):
    folder, expected = one_process
    found = _run(case, folder, tmp_path / "found.pt", distributed_optimizer=True)
    assert max(relative_errors(found["weights"], expected["weights"]).values()) < 1e-5
    assert found["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
