"""Predicts vLLM's sharding from names and shapes: the boxes of Hugging Face tensors that each worker's loaders copy.

For planning only. A real sync learns boxes from the loaders (`lazy_tensors.py`); a test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megagrpo.config import Problem, ProblemError
from megagrpo.models.families.shared.architecture import HfConfig
from megagrpo.models.families.shared.boxes import Box, cut, size, whole
from megagrpo.sync.wire.sync_plan import layer_of

VOCAB_PADDING = 64  # rows; vLLM rounds the vocabulary up to a multiple of it before sharding
BY_ROWS = {"q_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj", "sinks"}
BY_ROWS |= {"per_layer_model_projection"}
BY_ROWS |= {"in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "D"}  # whole heads
BY_ROWS |= {"conv"}  # channels of short convolutions
RECURRENT_PARTS = {"conv1d", "in_proj_qkv", "in_proj"}  # parts of all heads, one above the other
BY_COLUMNS = {"o_proj", "out_proj", "down_proj", "w2"}
# Besides these: every tensor with norm in its name, and all tensors of a router.
KEPT_WHOLE = {"gate", "wg", "router", "moe_statics", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa"}
KEPT_WHOLE |= {"layer_scalar", "block_sparse_moe", "wq_b", "wk", "weights_proj"}  # MiniMax-M2's biases, indexers
KEPT_WHOLE |= {"per_layer_input_gate", "per_layer_projection"}
KEPT_WHOLE |= {"act_fn", "feed_forward"}  # parameters of an activation, LFM2's biases of experts
STACKED_GATE_UP, STACKED_DOWN = "input_linear", "output_linear"  # of all experts of a block, [E, 2 I, H] and [E, H, I]
MLP_KINDS = {STACKED_GATE_UP: "gate_up_proj", STACKED_DOWN: "down_proj"}  # the same names in an MLP
_MIXERS = ("linear_attn", "mamba", "mixer")
_HOLDERS = ("self_attn", "experts", *_MIXERS)  # modules that hold tensors themselves, besides blocks
EMBEDDING_WORDS, HEAD_WORD, PER_LAYER = {"embed_tokens", "embeddings"}, "lm_head", "per_layer"


@dataclass(frozen=True)
class EngineLayout:
    """`servers` vLLM servers of `workers` each: tensor parallel x pipeline parallel x data-parallel copies.

    With `ep` above 1 each expert is whole and the experts are sharded over `ep` workers of a stage. `ep` is `tp` or a
    multiple of it:
    the non-expert weights then have ep / tp data-parallel copies. Raises ProblemError for another `ep`.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    servers: int = 1

    def __post_init__(self) -> None:
        if self.ep > 1 and self.ep % self.tp:
            said = f"experts over ep {self.ep} workers of a server need a multiple of tp {self.tp}"
            raise ProblemError(Problem(("rollout.tp", "rollout.enable_expert_parallel"), said))

    @property
    def copies(self) -> int:
        """Number of data-parallel copies of a server's attention."""
        return max(1, self.ep // self.tp)

    @property
    def workers(self) -> int:
        """Number of workers of one server."""
        return self.tp * self.pp * self.copies


@dataclass(frozen=True)
class _Worker:
    """Ranks of one worker of a server: tensor parallel, pipeline parallel, data-parallel copy."""

    tp_rank: int
    pp_rank: int
    copy: int


def wanted_boxes(
    shapes: Mapping[str, tuple[int, ...]], model: HfConfig, layout: EngineLayout
) -> dict[str, dict[Box, list[int]]]:
    """Return tensor -> box -> workers loading it, numbered over servers, for tensors with these names and full shapes.

    Raises ProblemError when vLLM cannot shard the model this way, or when a tensor's kind is unknown here.
    """
    stages = pipeline_stages(model.num_layers, layout.pp)
    every = range(0, layout.servers * layout.workers, layout.workers)
    # all layers of one stage are sharded alike
    known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[Box, list[int]]] = {}
    wanted = {}
    for name, shape in shapes.items():
        layer = layer_of(name)
        places = _stages_of(name, layer, stages, model)
        key = (name.replace(f".{layer}.", ".", 1), shape, tuple(places))
        if key not in known:
            boxes = _server_boxes(name, shape, model, layout, places)
            known[key] = {
                box: [first + number for first in every for number in numbers] for box, numbers in boxes.items()
            }
        wanted[name] = known[key]
    return wanted


def _server_boxes(
    name: str, shape: tuple[int, ...], model: HfConfig, layout: EngineLayout, stages: list[int]
) -> dict[Box, list[int]]:
    """Return box -> the workers of one server that load it, for a tensor that belongs to `stages`."""
    boxes: dict[Box, list[int]] = {}
    for number in range(layout.workers):
        worker = _Worker(number % layout.tp, number // layout.tp % layout.pp, number // layout.tp // layout.pp)
        for box in _boxes(name, shape, model, layout, worker) if worker.pp_rank in stages else []:
            if size(box):
                boxes.setdefault(box, []).append(number)
    return boxes


def pipeline_stages(layers: int, pp: int) -> list[range]:
    """Return the decoder layers of each stage: equal numbers, the remainder one each on the stages before the last."""
    counts = [layers // pp] * pp
    for stage in range(layers % pp):
        counts[-2 - stage] += 1
    ends = [sum(counts[: i + 1]) for i in range(pp)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _stages_of(name: str, layer: int, stages: list[range], model: HfConfig) -> list[int]:
    if layer >= 0:
        return [stage for stage, layers in enumerate(stages) if layer in layers]
    if PER_LAYER in name:  # vLLM's stages all have them
        return list(range(len(stages)))
    last = len(stages) - 1
    if EMBEDDING_WORDS & {*name.split(".")}:
        return sorted({0, last}) if model.tied_embeddings else [0]
    return [last]


def _boxes(name: str, shape: tuple[int, ...], model: HfConfig, layout: EngineLayout, worker: _Worker) -> list[Box]:
    words = name.split(".")
    own = len(words) == 1 or words[-2] in _HOLDERS or words[-2].isdecimal()
    kind = words[-1] if own else words[-2]
    if kind in {*EMBEDDING_WORDS, f"embed_tokens_{PER_LAYER}", HEAD_WORD}:
        return [_vocabulary(name, shape, layout.tp, worker.tp_rank)]
    if any(word.startswith("shared_") for word in words) and layout.copies > 1 and layout.tp > 1:
        return [whole(shape)]  # each worker runs the shared experts on its own tokens
    if kind == "norm" and words[-3] in ("mamba", "mixer"):  # of the recurrent output, by heads
        return [_part(name, shape, 0, 0, shape[0], layout.tp, worker.tp_rank)]
    kept = kind in KEPT_WHOLE or words[-1] == "e_score_correction_bias"
    if "norm" in kind or "router" in words or kept or (kind in BY_COLUMNS and words[-1] == "bias"):
        return [whole(shape)]
    if words[-2] == "experts":  # one tensor holds all experts of a block; dim 0 is the expert
        stacked = _stacked_rows if model.mixture.beside_mlp else _stacked_experts
        return stacked(name, shape, model, layout, worker)
    kind = MLP_KINDS.get(kind, kind) if len(shape) == 2 else kind
    if kind in (STACKED_GATE_UP, STACKED_DOWN):
        return _stacked_rows(name, shape, model, layout, worker)
    if "experts" in words and layout.ep > 1:
        return [whole(shape)] if int(words[words.index("experts") + 1]) in _experts(model, layout, worker) else []
    if kind in BY_COLUMNS:
        return [_part(name, shape, 1, 0, shape[1], layout.tp, worker.tp_rank)]
    mine = (layout.tp, worker.tp_rank)
    parts = min(layout.tp, model.num_kv_heads)
    # several workers share a KV head if there are more workers than heads
    keys = (parts, worker.tp_rank * parts // layout.tp)
    if kind in ("k_proj", "v_proj"):
        return [_part(name, shape, 0, 0, shape[0], *keys)]
    if kind == "qkv_proj":
        rows = model.num_kv_heads * model.head_dim
        queries = shape[0] - 2 * rows
        return [
            _part(name, shape, 0, 0, queries, *mine),
            *(_part(name, shape, 0, at, rows, *keys) for at in (queries, queries + rows)),
        ]
    if kind in RECURRENT_PARTS and (recurrence := model.recurrence):
        boxes, start = [], 0
        for part, rows in (recurrence.convolved if kind == "conv1d" else recurrence.sections(kind)).items():
            share = (1, 0) if part in recurrence.shared_parts(layout.tp) else mine
            boxes.append(_part(name, shape, 0, start, rows, *share))
            start += rows
        return boxes
    if kind == "gate_up_proj":
        half = shape[0] // 2
        return [_part(name, shape, 0, at, half, *mine) for at in (0, half)]
    if kind in BY_ROWS:
        return [_part(name, shape, 0, 0, shape[0], *mine)]
    raise ProblemError(Problem(("model",), f"{name}: unknown how vLLM shards tensors of this kind"))


def _part(name: str, shape: tuple[int, ...], dim: int, start: int, length: int, parts: int, part: int) -> Box:
    """Return part `part` of `parts` equal parts of elements [start, start + length) along dimension `dim`."""
    if length % parts:
        raise ProblemError(
            Problem(("rollout.tp",), f"{name} of shape {shape} cannot be cut into {parts} along dimension {dim}")
        )
    step = length // parts
    return cut(shape, dim, start + part * step, start + part * step + step)


def _stacked_experts(
    name: str, shape: tuple[int, ...], model: HfConfig, layout: EngineLayout, worker: _Worker
) -> list[Box]:
    if layout.ep > 1:
        mine = _experts(model, layout, worker)
        return [cut(shape, 0, mine.start, mine.stop)]
    if name.endswith("down_proj_bias"):
        return [whole(shape)]
    # [expert, in, out] of down_proj, or [expert, in, gate and up], interleaved or one after the other
    dim = 1 if name.endswith("down_proj") else len(shape) - 1
    sides = 2 if dim > 1 and not model.mixture.interleaved else 1
    length = shape[dim] // sides
    return [_part(name, shape, dim, side * length, length, layout.tp, worker.tp_rank) for side in range(sides)]


def _stacked_rows(
    name: str, shape: tuple[int, ...], model: HfConfig, layout: EngineLayout, worker: _Worker
) -> list[Box]:
    """Like `_stacked_experts`, for tensors with the output dimension before the input one, gate above up."""
    if layout.ep > 1:
        mine = _experts(model, layout, worker)
        return [cut(shape, 0, mine.start, mine.stop)]
    if STACKED_DOWN in name or name.endswith("down_proj"):
        return [_part(name, shape, 2, 0, shape[2], layout.tp, worker.tp_rank)]
    half = shape[1] // 2
    return [_part(name, shape, 1, at, half, layout.tp, worker.tp_rank) for at in (0, half)]


def _vocabulary(name: str, shape: tuple[int, ...], tp: int, tp_rank: int) -> Box:
    padded = -(-shape[0] // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        raise ProblemError(
            Problem(("rollout.tp",), f"{name} has {padded} rows with vLLM's padding, which tp={tp} does not divide")
        )
    step = padded // tp
    return cut(shape, 0, min(tp_rank * step, shape[0]), min(tp_rank * step + step, shape[0]))


def _experts(model: HfConfig, layout: EngineLayout, worker: _Worker) -> range:
    """Return the experts of a worker: equal numbers, with the remainder one each on the first workers."""
    each, over = divmod(model.mixture.count, layout.ep)
    index = worker.copy * layout.tp + worker.tp_rank
    start = index * each + min(index, over)
    return range(start, start + each + (index < over))
