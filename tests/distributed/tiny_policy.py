"""A tiny model in any layout, a batch for it, and its tensors put together: what tests of the policy over ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megagrpo.bridge.families import blocks
from megagrpo.config import RunConfig
from megagrpo.data.packing import PackingRules
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
EXPERTS = dict(head_dim=16, moe_intermediate_size=32, num_experts_per_tok=2)


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    parallel: dict
    model: dict | None = None
    train: dict | None = None
    share_prompts: bool = False
    algorithm: dict | None = None

    def __str__(self):
        return self.name


def hf_folder(family: str, folder: Path, changes: dict | None = None) -> Path:
    """A random tiny checkpoint of one family, made by transformers."""
    import transformers

    torch.manual_seed(0)
    sizes = SIZES | (changes or {})
    configs = {
        "llama": lambda: transformers.LlamaConfig(**sizes, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, tie_word_embeddings=False),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**sizes | EXPERTS, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1]),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, num_local_experts=4),
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
            algorithm=dict(loss_type="grpo", beta=0.1) | algorithm | (case.algorithm or {}),
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


def packing_rules(case: Case, settings: RunConfig) -> PackingRules:
    """How the trainer would pack for this case."""
    parallel = settings.parallel
    return PackingRules(
        max_tokens=settings.train.max_tokens_per_micro_batch,
        at_least=parallel.pp,
        multiple_of=parallel.pp if parallel.vpp > 1 else 1,
        align=parallel.micro_batch_align,
        sequence_align=parallel.sequence_align,
        share_prompts=case.share_prompts,
    )


def old_logprobs(micro_batch) -> torch.Tensor:
    """Old log-probs [T] that clip some tokens and do not depend on where a token was packed."""
    noise = torch.sin(micro_batch.position_ids.float() + micro_batch.labels.float())
    return torch.where(micro_batch.loss_mask, -4.6 + 0.3 * noise, 0.0)


def full_tensors(policy, hf_config, layout, part) -> dict[str, torch.Tensor]:
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
