"""Counts a model's parameters, and those on each rank of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

from megagrpo.config import LoraSection, ParallelSection
from megagrpo.families.hf_config import HfConfig, stage_layers


def layer_parameters(model: HfConfig, layer: int, tp: int = 1) -> int:
    """Return the parameters of one layer on one of `tp` ranks, without experts. The router is on every rank."""
    cut, whole = _linears(model)[layer]
    whole += (model.layers_per_block - model.parallel_blocks) * (model.pre_norms + model.post_norms) * model.hidden_size
    if model.has_attention(layer):
        vectors = _attention_vectors(model.in_block(layer))
        cut, whole = cut + vectors[0], whole + vectors[1]
    if (recurrence := model.recurrence) is not None and model.mixes(layer):
        cut, whole = cut + recurrence.vectors[0], whole + recurrence.vectors[1]
    if model.has_experts(layer):
        gate = model.hidden_size * (model.mixture.shared_gate + 3 * model.mixture.beside_mlp)  # or three more norms
        return cut // tp + whole + gate + router_parameters(model)
    of_inputs = model.hidden_size * (2 * model.layer_inputs + 1) if model.layer_inputs else 0
    return cut // tp + whole + of_inputs + 2 * (model.activation == "xielu")  # whose parameters these two are


def router_parameters(model: HfConfig) -> int:
    """Return the parameters of the router of one layer with experts."""
    factors = (model.hidden_size + model.mixture.count) * model.mixture.beside_mlp
    return model.mixture.count * (model.hidden_size + model.linear_bias) + factors


def layer_route_bytes(model: HfConfig) -> int:
    """Return the bytes of a token's experts in one layer with experts."""
    return model.mixture.per_token * (1 if model.mixture.count <= 256 else 2)


def _attention_vectors(model: HfConfig) -> tuple[int, int]:
    """Return the parameters of a layer's attention outside its projections: biases, norms, sinks and the indexer, as
    (sharded over tensor-parallel ranks, replicated on all ranks)."""
    mla, heads = model.mla, model.num_heads
    if mla is not None:
        return 0, (mla.query_rank or 0) + mla.kv_rank + indexer_parameters(model)
    biases = model.head_dim * (heads + 2 * model.num_kv_heads) if model.qkv_bias else 0
    head_norms = (2 - model.borrows) * model.head_dim if model.qk_norm and not model.wide_qk_norm else 0
    wide_norms = model.head_dim * (heads + model.num_kv_heads) if model.wide_qk_norm else 0
    return biases + wide_norms + heads * model.sinks, head_norms + model.hidden_size * model.linear_bias


def indexer_parameters(model: HfConfig) -> int:
    """Return the frozen parameters of a layer's indexer, which every tensor-parallel rank has; 0 without one."""
    mla, indexer = model.mla, model.indexer
    if mla is None or indexer is None:
        return 0
    of_queries = (mla.query_rank or 0) * indexer.heads * indexer.head_dim
    return of_queries + model.hidden_size * (indexer.head_dim + indexer.heads) + 2 * indexer.head_dim


def stage_experts(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Return the experts' parameters on one rank of each pipeline stage."""
    if model.experts is None:
        return [0] * parallel.pp
    width = model.experts.intermediate_size // parallel.expert_tp
    one = model.mlp_matrices * model.hidden_size * width + (2 * width + model.hidden_size if model.linear_bias else 0)
    of_layer = one * model.experts.count // parallel.ep
    return [of_layer * mixed for mixed in _mixed_counts(model, parallel)]


@lru_cache(maxsize=64)
def expert_parameters(model: HfConfig) -> int:
    """Return the parameters of all experts."""
    return stage_experts(model, ParallelSection())[0]


def layers_of_ranks(model: HfConfig, parallel: ParallelSection) -> list[list[int]]:
    """Return the layer indices on a rank of each pipeline stage, all its virtual stages together."""
    borders = accumulate(stage_layers(model.num_layers, parallel), initial=0)
    pieces = [range(start, stop) for start, stop in pairwise(borders)]
    return [[layer for piece in pieces[stage :: parallel.pp] for layer in piece] for stage in range(parallel.pp)]


# Of a layer: whether it has experts, an MLP, a recurrent part, attention, the width of a head, and whether it borrows
# keys and values
Kind = tuple[bool, bool, bool, bool, int, bool]


def _layer_counts(model: HfConfig, parallel: ParallelSection) -> list[dict[Kind, int]]:
    """Return, per pipeline stage, the number of layers of each kind."""
    return _counted(model, tuple(stage_layers(model.num_layers, parallel)), parallel.pp)


def _mixed_counts(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Return, per pipeline stage, the number of layers with experts."""
    return [sum(count for (mixed, *_), count in kinds.items() if mixed) for kinds in _layer_counts(model, parallel)]


@lru_cache(maxsize=1024)
def _counted(model: HfConfig, pieces: tuple[int, ...], pp: int) -> list[dict[Kind, int]]:
    cut = ParallelSection(pp=pp, vpp=len(pieces) // pp, pipeline_layers=list(pieces))
    return [Counter(_kind(model, layer) for layer in layers) for layers in layers_of_ranks(model, cut)]


def _kind(model: HfConfig, layer: int) -> Kind:
    parts = model.has_experts, model.has_mlp, model.is_recurrent, model.has_attention
    experts, mlp, recurrent, attention = (part(layer) for part in parts)
    own = model.in_block(layer)
    return experts, mlp, recurrent, attention, own.head_dim, own.borrows


@lru_cache(maxsize=64)
def _kind_parameters(model: HfConfig, tp: int) -> dict[Kind, int]:
    """Return the parameters of a layer of each kind. All layers of a kind are alike."""
    return {
        kind: layer_parameters(model, layer, tp)
        for kind, layer in {_kind(model, layer): layer for layer in range(model.num_layers)}.items()
    }


def stage_parameters(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Return parameters on one rank of each stage, without experts. A tied output layer elsewhere is a second copy."""
    tp = parallel.tp
    of_kind = _kind_parameters(model, tp)
    sizes = [sum(of_kind[kind] * count for kind, count in kinds.items()) for kinds in _layer_counts(model, parallel)]
    rows, vectors = model.padded_vocab(tp) // tp, model.layer_inputs * model.num_layers
    embedding = rows * model.hidden_size
    sizes[0] += embedding + vectors * (rows + model.hidden_size) + model.layer_inputs
    sizes[-1] += model.hidden_size
    if parallel.pp > 1 or not model.tied_embeddings:
        sizes[-1] += embedding
    return sizes


def largest_chunks(model: HfConfig, parallel: ParallelSection) -> list[int]:
    """Return, per pipeline stage, the trained parameters of its largest model chunk by kind (experts or all else).

    The sharded optimizer moves one such chunk at a time to its buffers. A stage without virtual stages is one chunk.
    """
    apart = parallel.model_copy(update={"pp": parallel.pp * parallel.vpp, "vpp": 1})
    of_chunks = [max(sizes) for sizes in zip(stage_parameters(model, apart), stage_experts(model, apart), strict=True)]
    return [max(of_chunks[stage :: parallel.pp]) for stage in range(parallel.pp)]


def stage_adapters(model: HfConfig, parallel: ParallelSection, lora: LoraSection) -> list[int]:
    """Return the adapters' parameters on one rank of each pipeline stage; 0 without LoRA."""
    if not lora.enabled:
        return [0] * parallel.pp
    return [
        sum(_layer_adapters(model, layer, parallel.tp, lora) for layer in layers)
        for layers in layers_of_ranks(model, parallel)
    ]


def _layer_adapters(model: HfConfig, layer: int, tp: int, lora: LoraSection) -> int:
    """Return one layer's adapter parameters on a rank. A is sharded if the projection shards its input, B if
    its output. Experts are not counted."""
    sizes, count = _projection_sizes(model, layer), 0
    for name in (module.rpartition(".")[2] for module in modules_of(model, [layer]) if lora.adapts(module)):
        inputs, outputs = sizes[name]
        rows = outputs if name in _ROW_PARALLEL + _WHOLE else outputs // tp
        count += lora.rank * (rows + (inputs // tp if name in _ROW_PARALLEL else inputs))
    return count


# their inputs are sharded over tensor-parallel ranks; others' outputs are
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "w2", "output_linear")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")  # projections to latents, which every rank holds


def _projection_sizes(model: HfConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the (inputs, outputs) of each projection of a layer outside its experts."""
    model = model.in_block(layer)
    width = model.mixture.shared_size if model.has_experts(layer) else model.intermediate_size
    hidden, queries, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    sizes = {
        "q_proj": (hidden, queries),
        **dict.fromkeys(("k_proj", "v_proj"), (hidden, keys)),
        "qkv_proj": (hidden, queries + 2 * keys),
        **dict.fromkeys(("o_proj", "out_proj"), (model.num_heads * model.value_dim, hidden)),
        **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (hidden, width)),
        "gate_up_proj": (hidden, 2 * width),
        **dict.fromkeys(("down_proj", "w2"), (width, hidden)),
        "input_linear": (hidden, 2 * width),
        "output_linear": (width, hidden),
    }
    if mla := model.mla:
        sizes["q_a_proj"] = (hidden, mla.query_rank or 0)
        sizes["q_b_proj"] = (mla.query_rank or 0, queries)
        sizes["kv_a_proj_with_mqa"] = (hidden, mla.kv_rank + mla.rope_dim)
        sizes["kv_b_proj"] = (mla.kv_rank, model.num_heads * (mla.nope_dim + mla.value_dim))
    if model.attention_gate:
        sizes["q_proj"] = (hidden, 2 * queries)
    if (recurrence := model.recurrence) is not None and model.mixes(layer):
        inputs = [module.rpartition(".")[2] for module in modules_of(model, [layer]) if ".in_proj" in module]
        sizes |= {name: (hidden, sum(recurrence.sections(name).values())) for name in inputs}
        sizes["out_proj"] = (recurrence.inner, hidden)
    return sizes


def stage_expert_adapters(model: HfConfig, parallel: ParallelSection, lora: LoraSection) -> list[int]:
    """Return the parameters of experts' adapters on one rank of each pipeline stage; 0 without them."""
    if not lora.enabled or model.experts is None:
        return [0] * parallel.pp
    hidden, width = model.hidden_size, model.experts.intermediate_size // parallel.expert_tp
    of_expert = lora.rank * model.experts.count // parallel.ep
    sizes = {"linear_fc1": hidden + (model.mlp_matrices - 1) * width, "linear_fc2": hidden + width}
    return [
        of_expert
        * sum(
            sizes[linear]
            for layer in layers
            for linear, name in model.expert_parameters(layer).items()
            if lora.adapts_experts(name)
        )
        for layers in layers_of_ranks(model, parallel)
    ]


def modules_of(model: HfConfig, layers: Iterable[int]) -> list[str]:
    """Return the modules of linears in these layers, such as model.layers.0.self_attn.q_proj, in the order of the
    forward pass."""
    return [name for layer in layers for names in model.modules(layer).values() for name in names]


@lru_cache(maxsize=64)
def _linears(model: HfConfig) -> list[tuple[int, int]]:
    """Return, per layer, the parameters of its projections outside experts: (sharded over tensor-parallel ranks, those
    to latents, which are whole on every rank)."""
    made = []
    for layer in range(model.num_layers):
        sizes = _projection_sizes(model, layer)
        names = [module.rpartition(".")[2] for module in modules_of(model, [layer])]
        whole = sum(prod(sizes[name]) for name in names if name in _WHOLE)
        made.append((sum(prod(sizes[name]) for name in names) - whole, whole))
    return made


def stage_linears(model: HfConfig, parallel: ParallelSection, apart: Sequence[int] = ()) -> list[int]:
    """Return the parameters of the blocks' parallel linears on one rank per pipeline stage, experts included, without
    those of the layers `apart`; not those of latents, whose weights are whole on every rank."""
    left_out = {layer % model.num_layers for layer in apart}
    experts = model.mlp_matrices * model.hidden_size * model.experts.intermediate_size if model.experts else 0
    experts = experts * model.mixture.count // parallel.ep // parallel.expert_tp if experts else 0
    stages = []
    for of_stage in layers_of_ranks(model, parallel):
        layers = [layer for layer in of_stage if layer not in left_out]
        dense = sum(_linears(model)[layer][0] // parallel.tp for layer in layers)
        stages.append(dense + experts * sum(map(model.has_experts, layers)))
    return stages


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its index, the indices of its layers, and parameter counts on one of its ranks."""

    index: int
    layers: list[int]
    outside: int  # parameters that belong to no expert
    experts: int
    adapters: int  # outside of experts
    expert_adapters: int
    linears: int
    chunk: int  # of the largest buffer of gradients
    in_fp8: int
    routers: int  # also counted in `outside`


def stages_of(
    model: HfConfig, parallel: ParallelSection, lora: LoraSection, bf16_layers: Sequence[int] | None
) -> list[Stage]:
    """Return the pipeline stages of a layout. `bf16_layers` do not multiply in FP8; None: no layer does."""
    in_fp8 = [0] * parallel.pp if bf16_layers is None else stage_linears(model, parallel, bf16_layers)
    layers, outside = layers_of_ranks(model, parallel), stage_parameters(model, parallel)
    experts, adapters = stage_experts(model, parallel), stage_adapters(model, parallel, lora)
    of_experts = stage_expert_adapters(model, parallel, lora)
    linears, chunks = stage_linears(model, parallel), largest_chunks(model, parallel)
    router = router_parameters(model) if model.experts else 0
    routers = [router * mixed for mixed in _mixed_counts(model, parallel)]
    of_stages = (layers, outside, experts, adapters, of_experts, linears, chunks, in_fp8, routers)
    return list(map(Stage, range(parallel.pp), *of_stages))


@lru_cache(maxsize=64)
def num_parameters(model: HfConfig) -> int:
    """Return the parameters of the whole model, as transformers counts them."""
    padding = (model.padded_vocab(1) - model.vocab_size) * model.hidden_size
    return stage_parameters(model, ParallelSection())[0] + expert_parameters(model) - padding


@lru_cache(maxsize=64)
def num_active_parameters(model: HfConfig) -> int:
    """Return the parameters that one token uses: of each mixture only the token's experts."""
    everything = expert_parameters(model)
    used = everything * model.experts.per_token // model.experts.count if model.experts else 0
    return num_parameters(model) - everything + used
