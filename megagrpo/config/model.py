"""The policy's weights and how they are laid out over ranks."""

from __future__ import annotations

from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from megagrpo.config.section import NonNegativeInt, PositiveInt, Section, Share


class ModelSection(Section):
    path: str
    """Policy weights: a Hugging Face folder, a hub name, or `package:NAME` for GGUF weights that an installed Python package carries."""
    reference_path: str | None = None
    """Weights of the reference, named as `path` is, of the same architecture and vocabulary; the policy's first weights when empty."""
    tokenizer: str | None = None
    """Tokenizer folder, hub name, or a bare SentencePiece `.model` file; the model's own when empty."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute precision. bf16 keeps fp32 master weights. auto: bf16 on a GPU and on CPUs with bf16 instructions, fp32 on others."""
    fp8_recipe: Literal["none", "tensorwise", "delayed", "blockwise", "mxfp8"] = "none"
    """Multiply in FP8 in the blocks' linears, forward and backward, with a scale for each tensor (`tensorwise`: of what it holds now;
    `delayed`: of what it held before), each 128 numbers (`blockwise`; of weights 128 x 128) or each 32 (`mxfp8`: Blackwell). Everything
    else stays in `precision`. docs/gpu.md."""
    fp8_amax_history_len: PositiveInt = 1024
    """With `delayed`: how many micro-batches' largest magnitudes a scale follows from."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """With `delayed`: a scale follows from the largest magnitude of the whole history, or from the newest one."""
    fp8_margin: NonNegativeInt = 0
    """With `delayed`: scales are smaller by 2^margin, which leaves magnitudes room to grow."""
    fp8_format: Literal["auto", "hybrid", "e4m3"] = "auto"
    """What FP8 numbers are: e4m3, or `hybrid`: gradients e5m2, of more range and less precision. auto: hybrid where a tensor has one scale,
    e4m3 where there are many."""
    bf16_layers: list[int] = []
    """Decoder layers, counted from 0 or with -1 from the last, whose linears multiply in `precision` as without FP8."""
    moe_router_padding_for_quantization: bool = False
    """With FP8 and experts: have routers send every expert a multiple of what FP8 multiplies, 16 or 32 tokens, some of which count for
    nothing, instead of adding rows of zeros to what an expert got. No result changes but by what such tokens do to scales."""
    fp8_param: bool = False
    """Keep the weights that are multiplied in FP8 as FP8 numbers between steps, rounded from the optimizer's float32 masters, instead of
    rounding bf16 ones for each product: the same steps, in less memory. vLLM gets the rounded weights. With `tensorwise` or `blockwise`."""
    base_storage: Literal["none", "fp8", "nf4"] = "none"
    """With LoRA: keep the frozen weights of the blocks' linears in 8 bits (e4m3) or 4 (NF4 of QLoRA) and a scale per 64 elements, and make
    them dense for each use. The model that is trained is the rounded one, and so is what vLLM gets."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: `selective` the core attention, `full` every layer."""
    offload_activations: Share = 0.0
    """Share of the decoder layers whose activations, those that `recompute` leaves, wait in the host's memory for the backward pass. Copies
    go on beside the computation; `megagrpo plan --gpu` says when they take longer."""

    @property
    def history_keys(self) -> dict[str, int | str]:
        """The keys that only `delayed` reads, as far as they are not as they would be anyway."""
        names = ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin")
        return {name: getattr(self, name) for name in names if getattr(self, name) != type(self).model_fields[name].default}

    @property
    def hybrid_fp8(self) -> bool:
        """Whether gradients are e5m2 numbers."""
        return self.fp8_format == "hybrid" or (self.fp8_format == "auto" and self.fp8_recipe in ("tensorwise", "delayed"))

    @property
    def token_align(self) -> int:
        """Tokens that a rank multiplies at once are a multiple of this: products in FP8 add up over them in the backward pass."""
        return {"none": 1, "tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}[self.fp8_recipe]

    @property
    def width_align(self) -> int:
        """Inputs and outputs that a rank has of a linear are a multiple of this: what Transformer Engine multiplies in FP8."""
        return {"none": 1, "tensorwise": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32}[self.fp8_recipe]


class ParallelSection(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size."""
    pp: PositiveInt = 1
    """Pipeline-parallel size."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (interleaved schedule); needs pp > 1."""
    pipeline_layers: list[PositiveInt] | None = None
    """Decoder layers of each pipeline stage in model order, pp x vpp numbers; as many on each when empty. Fewer on the first and the last
    stage make room for the embedding and the LM head."""
    cp: PositiveInt = 1
    """Context-parallel size: cuts every sequence into 2 x cp chunks and gives each rank two of them, so that a rank holds 1/cp of the
    tokens."""
    ep: PositiveInt = 1
    """Expert-parallel size: ranks that share out the experts of a mixture-of-experts model. They are ranks that tp and dp have already,
    regrouped for the experts, so ep needs none of its own."""
    etp: PositiveInt | None = None
    """Tensor-parallel size inside each expert; `tp` when empty."""
    sequence_parallel: bool = False
    """Shard norms and residuals over the tensor-parallel group along the sequence; needs tp > 1."""
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 30.0
    """A collective that waits longer than this fails with an error instead of hanging."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica: they work on the same micro-batches."""
        return self.tp * self.cp * self.pp

    @property
    def sequence_align(self) -> int:
        """Every packed sequence is padded to a multiple of this many tokens, so that it can be cut into 2 x cp equal chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    def micro_batch_align(self, token_align: int) -> int:
        """Every micro-batch is padded to a multiple of this many tokens: sequence parallelism cuts each context-parallel rank's part, and
        what is left for a rank is a multiple of `token_align`."""
        return lcm(self.sequence_align, self.cp * token_align) * (self.tp if self.sequence_parallel else 1)

    @property
    def expert_tp(self) -> int:
        """Ranks that hold one expert together."""
        return self.etp or self.tp

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that hold one copy of all experts."""
        return self.ep * self.expert_tp * self.pp

    @property
    def smallest_world(self) -> int:
        """The fewest ranks that make whole replicas and whole sets of experts."""
        return lcm(self.model_parallel_size, self.expert_parallel_size)
