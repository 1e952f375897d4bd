"""Maps this rank's parameters to blocks of Hugging Face tensors. Load, export and weight sync all use this mapping."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, table_of
from megagrpo.families.parts.llama_table import EMBEDDING, HEAD
from megagrpo.families.shared.blocks import Block, Local, gated, in_layer, interleaved, named, of_all_experts, same
from megagrpo.families.shared.boxes import whole
from megagrpo.families.shared.vision import TOWER
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.fp8.dense_access import DenseWeight
from megagrpo.policy.fp8.tensor import is_fp8
from megagrpo.policy.layers.activations import XIELU_CONSTANTS
from megagrpo.policy.lora.lora_layers import ADAPTER_MODULE, ExpertAdapter, LowRank, is_adapter, is_added
from megagrpo.policy.lora.quantized_base import StoredWeight
from megagrpo.policy.transformer.specs import BLOCK_SCALE

# The prefix of PEFT's names for adapters; the name in the base model follows.
PEFT = "base_model.model."
# a parameter of this rank, or what reads like one that is stored in fewer bits
Parameter = Tensor | StoredWeight | DenseWeight

_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Either one module per expert, or Transformer Engine's grouped linear with one weight and bias per expert.
_EXPERT = re.compile(r"(mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)")
BUFFERS = (".router.expert_bias", BLOCK_SCALE, *XIELU_CONSTANTS)  # ends of the names of buffers that files hold
_ADAPTER = re.compile(r"(.+)\.adapter\.(\w+)\.(lora_\w+)")
_EXPERT_ADAPTER = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc[12]")


def blocks(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout
) -> Iterator[tuple[str, Parameter, list[Block]]]:
    """Yield (name, parameter, its blocks) for this rank's weights without adapters, in model order. No communication.

    Names are unique within the rank: names of later virtual stages start with "chunkN.". The blocks cover the
    parameter, except rows of the padded vocabulary. Tied embeddings on two pipeline stages occur twice, with equal
    blocks. A weight stored in fewer bits is yielded as its `StoredWeight` or `DenseWeight`. Raises KeyError when the
    family has no rule for a parameter.
    """
    table = table_of(hf_config)
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        # Megatron keeps the routers' expert biases as buffers, in float32 even in a bfloat16 model
        biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(BUFFERS)]
        for name, weight in (*model.named_parameters(), *biases):
            if is_added(name):
                continue
            module = model.get_submodule(name.rpartition(".")[0]) if name.endswith(".weight") else None
            stored = getattr(module, "stored", weight)
            param: Parameter = DenseWeight(stored) if is_fp8(stored) else stored
            in_decoder = _IN_LAYER.fullmatch(name)
            key, layer = (
                (in_decoder[2], _block_number(model, int(in_decoder[1]), hf_config)) if in_decoder else (name, None)
            )
            if key == HEAD and hf_config.tied_embeddings:
                key = EMBEDDING  # the last stage's copy
            tensor_parallel = layout.parallel.tp, layout.tp_rank
            expert: int | None = None
            if part := _EXPERT.fullmatch(key):
                key, tensor_parallel = part[1] + part[3], (layout.parallel.expert_tp, layout.etp_rank)
                expert = int(part[2] or part[4]) + layout.ep_rank * (hf_config.mixture.count // layout.parallel.ep)
            if key not in table:
                raise KeyError(f"family {hf_config.family} has no rule for Megatron parameter {name}")
            own = hf_config if layer is None else hf_config.in_block(layer)
            patterns = table[key].blocks(Local(param, *tensor_parallel, own, expert))
            yield f"chunk{i}.{name}" if i else name, param, [in_layer(block, layer, expert) for block in patterns]


@torch.no_grad()
def fill(param: Parameter, parameter_blocks: list[Block], value_of: Callable[[Block], Tensor]) -> None:
    """Write `value_of(block)` [block_shape], of any dtype, into a parameter from `blocks`. Padding becomes 0."""
    dense = param.data
    dense.zero_()
    for block in parameter_blocks:
        view = block.view(dense)
        view.copy_(value_of(block).reshape(view.shape))
    if isinstance(param, (StoredWeight, DenseWeight)):
        param.store(dense)


def adapter_blocks(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout
) -> Iterator[tuple[str, Tensor, list[Block]]]:
    """Like `blocks`, for this rank's adapters only: A [rank, in] and B [out, rank]. Names are those of PEFT's files.

    Experts are parts of one A [experts, rank, in] and B [out, rank, experts], which PEFT's files flatten to matrices.
    """
    table = FAMILIES[hf_config.family].table(hf_config)
    for i, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        for name, param in model.named_parameters():
            if not is_adapter(name):
                continue
            in_decoder = _IN_LAYER.fullmatch(name)
            adapter = _ADAPTER.fullmatch(in_decoder[2]) if in_decoder else None
            assert in_decoder and adapter, f"{name} is an adapter outside of the decoder's linears"
            linear, projection, matrix = adapter.groups()
            block_number = _block_number(model, int(in_decoder[1]), hf_config)
            if in_expert := _EXPERT_ADAPTER.fullmatch(linear):
                expert = int(in_expert[1]) + layout.ep_rank * (hf_config.mixture.count // layout.parallel.ep)
                both = hasattr(model.get_submodule(f"{name.rpartition('.linear_')[0]}.linear_fc2"), ADAPTER_MODULE)
                # PEFT wraps the module of all experts once per parameter
                module = hf_config.experts_module(block_number)
                module += ".base_layer" if both and projection != "down_proj" else ""
                name_in_file = f"{PEFT}{module}.{matrix}.weight"
                local = Local(param, layout.parallel.expert_tp, layout.etp_rank, hf_config, expert)
                yield f"chunk{i}.{name}" if i else name, param, _expert_blocks(name_in_file, projection, local)
                continue
            rule = table[f"{linear}.weight"]
            weight = next(name for name in rule.names if name.split(".")[-2] == projection)
            # B of a fused projection is laid out like its weight
            if matrix == "lora_A" or len(rule.names) > 1:
                rule = same(weight) if matrix == "lora_A" or rule.of_tensor is None else rule.of_tensor(weight)
            own = hf_config.in_block(block_number)
            patterns = rule.blocks(Local(param, layout.parallel.tp, layout.tp_rank, own))
            named_blocks = [in_layer(block, block_number) for block in patterns]
            module = hf_config.module_names.of(named_blocks[0].name).removesuffix("weight")
            name_in_file = f"{PEFT}{module}{matrix}.weight"
            renamed = [dataclasses.replace(block, name=name_in_file) for block in named_blocks]
            yield f"chunk{i}.{name}" if i else name, param, renamed


def _expert_blocks(name: str, projection: str, local: Local) -> list[Block]:
    """Return the blocks of A or B of one expert, in the tensor `name` of all experts."""
    experts, expert, in_a = local.hf.mixture, local.expert, "lora_A" in name
    assert expert is not None, f"{name} belongs to no expert"
    rule = same(name)
    if projection == "gate_up_proj" and not in_a:
        rule = interleaved(name) if experts.interleaved else gated(name, name)
    return [of_all_experts(block, expert, experts.count, first=in_a) for block in rule.blocks(local)]


def trained_blocks(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout, biases: bool = False
) -> list[tuple[str, Tensor | DenseWeight, list[Block]]]:
    """Return (name, parameter in Megatron's shape, its blocks) for everything with a gradient on this rank; with
    `biases` also for the routers' expert biases, which have none."""
    return [
        *adapter_blocks(chunks, hf_config, layout),
        *(
            (name, param, parameter_blocks)
            for name, param, parameter_blocks in blocks(chunks, hf_config, layout)
            if isinstance(param, DenseWeight)
            or (isinstance(param, Tensor) and (param.requires_grad or (biases and not isinstance(param, nn.Parameter))))
        ),
    ]


def _block_number(model: nn.Module, index: int, hf_config: HfConfig) -> int:
    """Return the index of the decoder block, from 0 over all pipeline stages, of the hybrid layer at `index`."""
    number: int = attrgetter("layer_number")(model.get_submodule(f"decoder.layers.{index}"))
    return (number - 1) // hf_config.layers_per_block


def tensor_names(hf_config: HfConfig) -> set[str]:
    """Return every tensor name of the whole model; for a tied model this includes the head."""
    names = set()
    for key, rule in table_of(hf_config).items():
        for block in _blocks_with(key, hf_config):
            experts: Iterable[int | None] = range(hf_config.mixture.count) if _EXPERT.fullmatch(key) else [None]
            names |= {named(pattern, block, expert) for pattern in rule.names for expert in experts}
    return names


def _blocks_with(key: str, hf_config: HfConfig) -> Iterable[int | None]:
    """Return the decoder blocks that have the parameter `key`; [None] for a parameter outside of all blocks."""
    if key == HEAD or key.startswith(("embedding.", "decoder.", f"{TOWER}.")):
        return [None]
    return [block for block in range(hf_config.num_layers) if hf_config.has(block, key)]


@dataclass(frozen=True)
class Merged:
    """The merged weight W + scale B A of one parameter on this rank, float32.

    Every read of `data` or `detach()` computes it again; nothing is cached. `parts` has each block, the adapter of its
    projection, and the number of B's rows for earlier blocks of the projection, or None if B is whole. A rank holds all
    of B A that its part of W needs, so there is no communication.
    """

    weight: Parameter
    parts: tuple[tuple[Block, LowRank, int | None], ...]
    scale: float

    dtype = torch.float32

    @property
    def data(self) -> Tensor:
        """The merged weight [out, in] of this rank, float32."""
        return self.detach()

    @torch.no_grad()
    def detach(self) -> Tensor:
        """Return the merged weight [out, in] of this rank, float32."""
        merged = self.weight.detach().to(torch.float32, copy=True)
        for block, low_rank, first in self.parts:
            view = block.view(merged)
            product = _rows(low_rank.lora_B, block, first).float() @ low_rank.lora_A.float()
            view.add_(product.view(view.shape), alpha=self.scale)
        return merged


def _rows(b: Tensor, block: Block, first: int | None) -> Tensor:
    """Return the rows of B [out, rank] for the block's rows of the weight. The rows of a fused projection are a part of
    B, ordered like the weight, from row `first` on. None: B is whole where the weight is sharded."""
    rows = block.block_shape[0]
    if len(b) == rows:
        return b
    if first is None:
        return b[block.slices[0]]
    if len(block.grid) == 2:
        return b[first : first + rows]
    return dataclasses.replace(block, grid=(*block.grid[:-1], b.shape[1])).view(b).reshape(-1, b.shape[1])


@torch.no_grad()
def merged_blocks(
    chunks: list[nn.Module], hf_config: HfConfig, layout: Layout
) -> Iterator[tuple[str, Parameter | Merged, list[Block]]]:
    """Like `blocks`, with a `Merged` in place of each weight with adapters. Exports and the engine use these."""
    modules: dict[str, nn.Module] = {}
    for i, chunk in enumerate(chunks):
        modules |= {f"chunk{i}.{name}" if i else name: module for name, module in unwrap_model(chunk).named_modules()}
    for name, param, parameter_blocks in blocks(chunks, hf_config, layout):
        adapter = getattr(modules[name.rpartition(".")[0]], "adapter", None)
        if adapter is None or not name.endswith(".weight"):
            yield name, param, parameter_blocks
            continue
        if isinstance(adapter, ExpertAdapter):  # rows of B are ordered like the weight's
            (part,) = adapter
            shape = tuple(param.shape)
            everything = Block(name, shape, whole(shape), shape, axis=0, at=0, count=shape[0])
            yield name, Merged(param, ((everything, adapter.low_rank(part), 0),), adapter.scale), parameter_blocks
            continue
        yield name, Merged(param, tuple(_adapted(parameter_blocks, adapter)), adapter.scale), parameter_blocks


def _adapted(parameter_blocks: list[Block], adapter: nn.ModuleDict) -> Iterator[tuple[Block, LowRank, int | None]]:
    """Yield `Merged.parts` of a linear's weight."""
    above, all_rows = Counter[str](), Counter[str]()
    for block in parameter_blocks:
        all_rows[projection(block)] += block.block_shape[0]
    for block in parameter_blocks:
        if (part := projection(block)) in adapter:
            low_rank: Any = adapter[part]
            yield block, low_rank, above[part] if all_rows[part] == len(low_rank.lora_B) else None
            above[part] += block.block_shape[0]


def projection(block: Block) -> str:
    """Return the projection of a block of a linear's weight, such as q_proj."""
    return block.name.split(".")[-2]
