"""Defines the sections `model` and `parallel`: the policy's weights, and their layout over ranks."""

from __future__ import annotations

import re
from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.basics.problems import Problem
from megagrpo.config.sections.section import PositiveInt, Section, Share


class ModelSection(Section):
    path: str
    """Policy weights: a Hugging Face folder, a hub name, or `package:NAME` for GGUF weights in a Python package."""
    reference_path: str | None = None
    """Weights of the reference, in the format of `path`, with the same architecture and vocabulary; the policy's
    initial weights when empty."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when empty."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute precision. bf16 and fp16 keep fp32 master weights; fp16 scales the loss. auto: bf16 on GPUs and CPUs with
    bf16 support, else fp32."""
    fp8_recipe: Literal["none", "tensorwise", "blockwise", "mxfp8"] = "none"
    """Multiply in FP8 in the blocks' linears, with a scale per tensor (`tensorwise`), 128 numbers
    (`blockwise`) or 32 numbers (`mxfp8`, on Blackwell). docs/fp8.md."""
    bf16_layers: list[int] = []
    """Decoder layers whose linears multiply in `precision` despite FP8; 0 is the first layer, -1 the last."""
    fp8_param: bool = False
    """Keep the weights that multiply in FP8 as FP8 numbers between steps, which saves memory: docs/fp8.md. vLLM gets
    the rounded weights. With `tensorwise` or `blockwise`."""
    base_storage: Literal["none", "fp8", "nf4"] = "none"
    """With LoRA: store the frozen weights of the blocks' linears in 8 bits (e4m3) or 4 bits (QLoRA's NF4). Training and
    vLLM use the rounded weights. docs/lora.md."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: `selective` only `recompute_modules`, `full` every layer."""
    recompute_modules: list[
        Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
    ] = ["core_attn"]
    """With `recompute: selective`: the modules to recompute, by Megatron's names. Without Transformer Engine
    `layernorm` and `moe_act` change nothing."""
    fusions: list[Literal["rope", "bias_activation"]] = []
    """Fused GPU kernels that round differently from vLLM's: rotary positions, and the MLP's bias and activation. They
    save time and memory, and need Transformer Engine; elsewhere nothing changes."""
    offload_activations: Share = 0.0
    """Share of the decoder layers whose activations (after `recompute`) are offloaded to host memory until the backward
    pass. Copies overlap with computation; `megagrpo plan --gpu` predicts when they take longer."""

    freeze_vision_tower: bool = True
    """With `data.images`: the vision tower and its projection keep their initial weights. False trains them with the
    language model, and weight syncs send them. docs/vision.md."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in the trainer; `auto` precision counts as bf16."""
        return 4 if self.precision == "fp32" else 2

    @property
    def token_align(self) -> int:
        """A rank's tokens per product are a multiple of this: FP8 products in the backward pass reduce over tokens."""
        return {"none": 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.fp8_recipe]

    @property
    def width_align(self) -> int:
        """A linear's input and output sizes per rank are a multiple of this, as Transformer Engine's FP8 requires."""
        return {"none": 1, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}[self.fp8_recipe]


class ParallelSection(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (interleaved schedule); needs pp > 1."""
    pipeline_layers: list[PositiveInt] | None = None
    """Decoder layers of each pipeline stage in model order, pp x vpp numbers; equal numbers when empty. Fewer layers on
    the first and last stage make room for the embedding and the LM head."""
    cp: PositiveInt = 1
    """Context-parallel size: each sequence is cut into 2 x cp chunks, two per rank: a rank holds 1/cp of the tokens."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts of a mixture of experts are sharded over this many ranks. These are the ranks
    of tp and dp, regrouped, so ep needs no additional ranks."""
    etp: PositiveInt | None = None
    """Size of tensor parallelism inside each expert; `tp` when empty."""
    expert_dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """What sends tokens to their experts: NCCL's all-to-all, one row per expert of a token; or kernels of the package
    `deep_ep`, one row per rank, by NVLink and RDMA (`deepep`), or fused with the sort by expert (`hybridep`)."""
    sequence_parallel: bool = False
    """Shard norms and residuals over the tensor-parallel group along the sequence; needs tp > 1."""
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """Timeout of a collective: one that waits longer fails with an error instead of hanging."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one data-parallel replica, which work on the same micro-batches."""
        return self.tp * self.cp * self.pp

    @property
    def sequence_align(self) -> int:
        """Packed sequences are padded to a multiple of this many tokens, to be cut into 2 x cp equal chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    def micro_batch_align(self, token_align: int) -> int:
        """Every micro-batch is padded to a multiple of this many tokens: sequence parallelism shards each
        context-parallel rank's part, and each resulting shard is a multiple of `token_align`."""
        return lcm(self.sequence_align, self.cp * token_align) * (self.tp if self.sequence_parallel else 1)

    @property
    def expert_tp(self) -> int:
        """Ranks over which one expert is sharded."""
        return self.etp or self.tp

    @property
    def expert_parallel_size(self) -> int:
        """Ranks over which one copy of all experts is sharded."""
        return self.ep * self.expert_tp * self.pp

    @property
    def smallest_world(self) -> int:
        """Smallest number of ranks with whole replicas and whole copies of the experts."""
        return lcm(self.model_parallel_size, self.expert_parallel_size)

    def world_problems(self, world_size: int) -> list[Problem]:
        """Return the problem of a number of ranks that the layout does not divide."""
        below = world_size // self.smallest_world * self.smallest_world
        nearest = " or ".join(str(ranks) for ranks in (below, below + self.smallest_world) if ranks)
        for product, text, sizes in (
            (
                self.model_parallel_size,
                "is not a multiple of parallel.tp x parallel.cp x parallel.pp",
                (self.tp, self.cp, self.pp),
            ),
            (
                self.expert_parallel_size,
                "is not a multiple of parallel.ep x parallel.etp x parallel.pp",
                (self.ep, self.expert_tp, self.pp),
            ),
        ):
            if world_size % product:
                keys = re.findall(r"parallel\.\w+", text)
                said = f"{world_size} {text} = {' x '.join(map(str, sizes))} = {product}; use {nearest} ranks"
                return [Problem(("world_size", *keys), said)]
        return []
