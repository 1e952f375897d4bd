"""Shrinks a run: the same model family, layout, loss and precision, with sizes that a laptop computes in a second."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm
from typing import Any
from zlib import crc32

import numpy as np
import torch

from megagrpo.config import LoraSection, ParallelSection, RunConfig
from megagrpo.config.sections.lora import ALL_LINEAR
from megagrpo.data.packing.routed_experts import RouteShape
from megagrpo.data.packing.sample_packing import padded
from megagrpo.families.config_keys import text_config
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, parse_hf_config
from megagrpo.families.shared.family import CHUNKED, COMMON, FULL, LINEAR, SLIDING, rope, rotated_share
from megagrpo.families.shared.recurrence import GatedDelta, Recurrence, ShortConv
from megagrpo.policy.transformer.specs import layer_pattern
from megagrpo.train_types import TrainSample
from megagrpo.types import Routes

VOCABULARY = 101  # prime: no tensor-parallel size divides it, so there are padding rows
MAX_PROMPT, MAX_RESPONSE = 16, 16  # tokens
CAP = 2.0  # cap of scores and logits, near their size here
WINDOW = 7  # tokens: shorter than most prompts
NUM_PROMPTS, GROUP_SIZE = 4, 3
LOGPROB_CHUNK = 16
# about the standard deviation of logits over temperature; the rollout log-probs are then near the policy's
LOGIT_SCALE = 0.4
_OUTER = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
# in names of vectors near 1, beside norms
_NEAR_ONE = ("layer_scalar", "act_fn", "router.scale", "per_expert_scale")
HANG_MINUTES = 5.0
# The first step of AdamW is lr * gradient / (|gradient| + epsilon). Usual rates move a weight by less than float32
# rounding. With an epsilon near 0 the step is a sign, which turns the rounding error of a zero into a whole step. These
# values make it follow the gradient.
LEARNING_RATE, ADAM_EPSILON = 1e-2, 1e-3


def shrink_config(config: RunConfig) -> RunConfig:
    """Return `config` for the small model and batch.

    Settings that decide how a step is computed stay: parallelism, precision, recompute, loss, KL, clipping, sampling
    temperature, packing, shared prompts, optimizer. Of `train.overlap` only `shared_experts` stays, which needs no GPU.
    """
    overlap = [name for name in config.train.overlap if name == "shared_experts"]
    config = config.without_overlap
    longest, records = MAX_PROMPT + MAX_RESPONSE, config.rollout.routing_replay == "trainer"
    changes: dict[str, dict[str, Any]] = {
        "run": dict(max_steps=100),
        # one optimizer step is verified; routes are recorded for several
        "algorithm": dict(steps_per_generation=1) | (dict(num_iterations=2) if records else {}),
        "model": dict(bf16_layers=[end for end in (0, -1) if end in config.model.bf16_layers]),
        "lora": _few_adapters(config.lora),
        "parallel": dict(
            timeout_minutes=min(config.parallel.timeout_minutes, HANG_MINUTES),
            pipeline_layers=_few_layers(config.parallel.pipeline_layers),
        ),
        "rollout": dict(
            max_prompt_length=MAX_PROMPT,
            max_completion_length=MAX_RESPONSE,
            prompts_per_step=NUM_PROMPTS,
            num_generations=GROUP_SIZE,
        ),
        "train": dict(
            learning_rate=LEARNING_RATE,
            adam_epsilon=ADAM_EPSILON,
            lr_scheduler_type="constant",
            warmup_steps=0,
            warmup_ratio=0.0,
            min_learning_rate=0.0,
            max_tokens_per_micro_batch=max(2 * longest, padded(longest, config.micro_batch_align)),
            logprob_chunk=LOGPROB_CHUNK,
            overlap=overlap,
        ),
    }
    sections = config.model_dump(exclude={"tasks"})
    return RunConfig.model_validate({name: values | changes.get(name, {}) for name, values in sections.items()})


def _few_layers(stages: list[int] | None) -> list[int] | None:
    """Return the layers of each stage: one for the smallest stages, up to three for larger ones."""
    return stages and [min(layers - min(stages) + 1, 3) for layers in stages]


def _few_adapters(lora: LoraSection) -> dict[str, Any]:
    """Return the section `lora` with few small adapters. The small model has other layers: of a selection the first
    layer stays, and names that may hold a layer's number lose it."""
    names = None if lora.names is None else list(dict.fromkeys(name.rpartition(".")[2] for name in lora.names))
    experts = dict.fromkeys(f"experts.{name.rpartition('.')[2]}" for name in lora.target_parameters)
    return dict(
        rank=min(lora.rank, 4),
        alpha=1.0,
        dropout=0.0,
        adapter_path=None,
        target_modules=ALL_LINEAR if names is None else names,
        target_parameters=list(experts),
        layers_to_transform=lora.layers_to_transform and [0],
    )


def plainly(config: RunConfig) -> RunConfig:
    """Return `config` on one process, without ways to save time or memory: no recompute, sharing, offload or fusion.

    The optimizer is sharded only for FP8 weights, which are rounded from sharded masters.
    """
    in_chunks = dict(fused_logprobs=False, logprobs_fp8_recipe="none", overlap=[])
    return config.model_copy(
        update=dict(
            parallel=ParallelSection(timeout_minutes=config.parallel.timeout_minutes),
            model=config.model.model_copy(update=dict(recompute="none", fusions=[], offload_activations=0.0)),
            train=config.train.model_copy(
                update=in_chunks | dict(share_prompts=False, distributed_optimizer=config.model.fp8_param)
            ),
        )
    )


def shrink_model(raw: dict[str, Any], parallel: ParallelSection, unit: int = 1) -> HfConfig:
    """Return a small model of the architecture in `raw`, a config.json, large enough for `parallel`.

    The widths of hidden states and latents, and a rank's parts of heads and MLPs, are multiples of `unit`. It keeps:

    - the family with its biases and norms, tied or untied embeddings, query heads per KV head, and several KV heads per
      rank, or one, or several ranks per KV head
    - whether some layers do not rotate queries and keys
    - whether heads add up to the hidden size, the rotary scaling, and whether all layers have a window, or some, or
      none
    - of a mixture of experts, whether a token has several experts and whether some layer has none
    - of latent attention, whether queries come from a latent, and whether experts are chosen by groups
    """
    raw = text_config(raw)
    real = parse_hf_config(raw)
    of_rank = ceil(real.num_kv_heads / parallel.tp)
    kv_heads = real.num_kv_heads if parallel.tp % real.num_kv_heads == 0 else parallel.tp * min(2, of_rank)
    heads = kv_heads * (real.num_heads // real.num_kv_heads)
    head_dim = padded(16 if heads < 8 else 8, unit)
    small: dict[str, Any] = dict(
        num_hidden_layers=sum(_few_layers(parallel.pipeline_layers) or []) or max(2, parallel.pp * parallel.vpp),
        hidden_size=heads * head_dim * (1 if real.hidden_size == real.num_heads * real.head_dim else 2),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * real.partial_rotary_factor),
        intermediate_size=padded(96, lcm(unit * parallel.tp, parallel.expert_tp)),
        vocab_size=VOCABULARY,
    )
    small |= _small_attention(real, unit) | _small_experts(real, parallel, unit)
    if (recurrence := real.recurrence) is not None:
        small |= _small_recurrence(recurrence, small["hidden_size"], parallel, unit)
    if real.mlp_blocks is not None:  # blocks of one part: each kind in turn
        symbols = [*dict.fromkeys(layer_pattern(real, [real.num_layers]))]
        pattern = "".join(symbols[layer % len(symbols)] for layer in range(small["num_hidden_layers"]))
        small |= dict(hybrid_override_pattern=pattern, layers_block_type=None)
    if real.borrowers:
        small |= dict(num_hidden_layers=4, num_kv_shared_layers=2)
    if real.layer_inputs:
        small |= dict(hidden_size_per_layer_input=padded(24, unit), vocab_size_per_layer_input=VOCABULARY)
    if real.unrotated:
        small |= dict(no_rope_layers=[(layer + 1) % 2 for layer in range(small["num_hidden_layers"])])
    if kinds := _layer_kinds(real, "layer_types" in raw):
        small |= dict(layer_types=[kinds[layer % len(kinds)] for layer in range(small["num_hidden_layers"])])
    if real.windows and real.global_heads:
        small["layer_types"][-1] = FULL
        small |= dict(per_layer_config=None, global_head_dim=2 * head_dim, num_global_key_value_heads=kv_heads)
    small |= {own: small[usual] for own, usual in FAMILIES[real.family].names.items() if usual in small}
    read = (*COMMON, *FAMILIES[real.family].keys, *raw)
    sizes = {key: value for key, value in small.items() if key in read}
    return parse_hf_config(raw | sizes | _short_rotary(raw, real, head_dim))


def _small_attention(real: HfConfig, unit: int) -> dict[str, Any]:
    """Return the sizes of latent attention and its indexer, the window, and the caps, as far as the model has them."""
    small: dict[str, Any] = {}
    if real.mla is not None:
        latent, half = padded(12, unit), padded(4, unit)
        small |= dict(q_lora_rank=padded(20, unit) if real.mla.query_rank else None, kv_lora_rank=latent)
        small |= dict(qk_nope_head_dim=padded(8, unit), qk_rope_head_dim=half)
        small |= dict(v_head_dim=padded(6, unit), head_dim=half)
        if real.indexer:  # fewer keys than the longest sequences have; with many heads no two keys have the score 0
            small |= dict(index_n_heads=16, index_head_dim=2 * half, index_topk=6)
    small |= dict(floor_scale=WINDOW) if real.query_scale else {}
    small |= dict(attn_logit_softcapping=CAP) if real.score_cap else {}
    small |= dict(final_logit_softcapping=CAP) if real.logit_cap else {}
    return small | (dict(sliding_window=WINDOW, attention_chunk_size=WINDOW) if real.windows else {})


def _small_experts(real: HfConfig, parallel: ParallelSection, unit: int) -> dict[str, Any]:
    """Return the sizes of a mixture of experts; empty without one."""
    if real.experts is None:
        return {}
    count = max(4, 2 * parallel.ep)
    return dict(
        num_experts=count,
        num_local_experts=count,
        n_routed_experts=count,
        n_shared_experts=1,
        n_group=2 if real.experts.groups > 1 else 1,
        topk_group=1,
        first_k_dense_replace=1 if 0 not in real.experts.blocks else 0,
        num_experts_per_tok=min(2, real.experts.per_token),
        top_k_experts=min(3, real.experts.per_token),  # of two, the norm of their sum cancels gradients
        moe_intermediate_size=padded(32, unit * lcm(parallel.expert_tp, parallel.tp)),
        shared_expert_intermediate_size=padded(32, unit * parallel.tp),
        moe_layers=None,
        mlp_layer_types=None,
        mlp_only_layers=[1] if len(real.experts.blocks) < real.num_layers else [],
        decoder_sparse_step=1,
    )


def _layer_kinds(real: HfConfig, named: bool) -> tuple[str, ...]:
    """Return the kinds of attention that layers have in turn; empty for a model that does not name them."""
    if real.windows:
        inside = CHUNKED if real.chunked else SLIDING
        return (inside, FULL) if None in real.windows else (inside,)
    if real.recurrence:
        return LINEAR, FULL
    return (FULL,) if named else ()


def _small_recurrence(real: Recurrence, hidden: int, parallel: ParallelSection, unit: int) -> dict[str, Any]:
    """Return the sizes of a recurrent part beside hidden states of width `hidden`, whose heads the ranks can share."""
    of_ranks = 2 * parallel.tp * parallel.cp
    small: dict[str, Any] = dict(rms_norm_eps=1e-2)  # the norm of a recurrent output near 0 would amplify rounding
    if isinstance(real, GatedDelta):
        return small | dict(
            linear_num_key_heads=of_ranks,
            linear_num_value_heads=of_ranks * (real.value_heads // real.key_heads),
            linear_key_head_dim=padded(16, unit),
            linear_value_head_dim=padded(12, unit),
            shared_expert_intermediate_size=padded(24, unit * parallel.tp),
        )
    if isinstance(real, ShortConv):
        return {}  # its channels are those of hidden states
    groups, width = 1 if real.groups == 1 else of_ranks, 4
    small |= dict(mamba_expand=2, mamba_d_ssm=2 * hidden, mamba_n_heads=2 * hidden // width, mamba_d_head=width)
    return small | dict(mamba_n_groups=groups, mamba_d_state=6 * parallel.tp)


def _short_rotary(raw: dict[str, Any], real: HfConfig, head_dim: int) -> dict[str, Any]:
    """Return the rotary parameters with the longrope factors that smaller heads need, and a short length after which
    queries grow."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if real.query_scale is not None and "llama_4_scaling_beta" in rope(raw):
        return {key: raw[key] | dict(original_max_position_embeddings=WINDOW)}
    if rope(raw)["rope_type"] != "longrope":
        return {}
    count = int(head_dim * rotated_share(raw, 1.0)) // 2
    return {key: raw[key] | {name: raw[key][name][:count] for name in ("short_factor", "long_factor")}}


def random_tensor(
    name: str, shape: tuple[int, ...], temperature: float = 1.0, centred_norms: bool = False
) -> torch.Tensor:
    """Return the weight `name`, float32 in `shape`. It depends on the arguments only, so layouts start from one model.

    Matrices keep the scale of their input. Norms and biases differ from 1 and 0, where an error could hide. With
    `centred_norms` the norms of hidden states, queries and keys are stored as their distance from 1.
    """
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("act_fn.eps"):  # xIELU jumps at 0 with other values, where rounding would decide
        return torch.full(shape, -1e-6)
    if len(shape) <= 1 or name.endswith("e_score_correction_bias"):
        from_one = "norm" in name and not (centred_norms and "linear_attn" not in name)
        return 0.1 * noise + (1.0 if from_one or any(word in name for word in _NEAR_ONE) else 0.0)
    scale = LOGIT_SCALE * temperature if name.endswith(_OUTER) else 1.0
    return scale * noise / shape[-1] ** 0.5


def random_samples(seed: int = 1) -> list[TrainSample]:
    """Return groups of responses with many lengths to prompts of many lengths: two truncated, some with zero advantage,
    some with foreign tokens in the middle.

    Every token of the policy has a unique rollout log-prob, which identifies the token wherever it was packed.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(NUM_PROMPTS * GROUP_SIZE):
        if i % GROUP_SIZE == 0:
            length = MAX_PROMPT if i == 0 else 1 + 2 * i % MAX_PROMPT
            prompt = torch.randint(0, VOCABULARY, (length,), generator=generator)
        length = MAX_RESPONSE if i in (0, 7) else 1 + 5 * i % MAX_RESPONSE
        ids = torch.cat([prompt, torch.randint(0, VOCABULARY, (length,), generator=generator)])
        mask = torch.arange(ids.numel()) >= prompt.numel()
        if i % 4 == 1:
            mask[prompt.numel() + length // 3 : prompt.numel() + 2 * length // 3] = False
        logprobs = torch.where(mask, -4.5 + 0.1 * torch.randn(ids.numel(), generator=generator), 0.0)
        advantage = float(0.5 + torch.randn((), generator=generator)) if i % 5 else 0.0
        samples.append(TrainSample(ids, mask, logprobs, advantage, index=i, truncated=i in (0, 7)))
    return samples


def random_routes(samples: Sequence[TrainSample], shape: RouteShape) -> dict[int, Routes]:
    """Return routes [L - 1, M, k] by sample, equal for equal prompts: a token's routes depend on its text so far."""
    routes = {}
    for sample in samples:
        rows = []
        for stop in range(1, sample.token_ids.numel()):
            seed = crc32(sample.token_ids[:stop].numpy().tobytes())
            draw = np.random.default_rng(seed).random((len(shape.layers), shape.experts))
            rows.append(draw.argsort(-1)[:, : shape.per_token])
        routes[sample.index] = np.array(rows, shape.dtype).reshape(-1, len(shape.layers), shape.per_token)
    return routes
