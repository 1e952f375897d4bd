"""Predicts vLLM's sharding from names and shapes: the boxes of Hugging Face tensors that each worker's loaders copy.

For plans only. A real sync learns boxes from the loaders (`lazy_tensors.py`); a test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megagrpo.config import Problem, ProblemError
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.boxes import Box, cut, size, whole
from megagrpo.weights.slices.sync_plan import layer_of

VOCAB_PADDING = 64  # rows; vLLM rounds the vocabulary up to a multiple of it before sharding
BY_ROWS = {"q_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj", "sinks"}
BY_ROWS |= {"per_layer_model_projection"}
BY_ROWS |= {"in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "D"}  # whole heads
BY_ROWS |= {"conv", "norm"}  # channels of short convolutions, heads of a recurrent output
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
EMBEDDING_WORDS, PER_LAYER = {"embed_tokens", "embeddings"}, "per_layer"
_VOCABULARY = {*EMBEDDING_WORDS, f"embed_tokens_{PER_LAYER}", "lm_head"}


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
    if kind in _VOCABULARY:
        return [_vocabulary(name, shape, layout.tp, worker.tp_rank)]
    if _is_whole(words, kind, layout):
        return [whole(shape)]
    kind = MLP_KINDS.get(kind, kind) if len(shape) == 2 else kind
    if words[-2] == "experts" or kind in (STACKED_GATE_UP, STACKED_DOWN):
        by_rows = words[-2] != "experts" or model.mixture.beside_mlp
        return _stacked(name, shape, model, layout, worker, by_rows)
    if "experts" in words and layout.ep > 1:
        return [whole(shape)] if int(words[words.index("experts") + 1]) in _experts(model, layout, worker) else []
    if kind in BY_COLUMNS:
        return [_part(name, shape, 1, 0, shape[1], layout.tp, worker.tp_rank)]
    return [_part(name, shape, 0, *rows) for rows in _rows(name, kind, shape[0], model, layout.tp, worker.tp_rank)]


def _is_whole(words: list[str], kind: str, layout: EngineLayout) -> bool:
    """Whether every worker loads the whole tensor."""
    if any(word.startswith("shared_") for word in words) and layout.copies > 1 and layout.tp > 1:
        return True  # each worker runs the shared experts on its own tokens
    if kind == "norm" and words[-3] in ("mamba", "mixer"):  # of the recurrent output, by heads
        return False
    kept = kind in KEPT_WHOLE or words[-1] == "e_score_correction_bias"
    return "norm" in kind or "router" in words or kept or (kind in BY_COLUMNS and words[-1] == "bias")


def _rows(
    name: str, kind: str, length: int, model: HfConfig, tp: int, tp_rank: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, length, parts, part) of each run of a tensor's rows that a worker has its part of."""
    # several workers share a KV head if there are more workers than heads
    parts = min(tp, model.num_kv_heads)
    keys = parts, tp_rank * parts // tp
    if kind in ("k_proj", "v_proj"):
        yield 0, length, *keys
    elif kind == "qkv_proj":
        rows = model.num_kv_heads * model.head_dim
        yield 0, length - 2 * rows, tp, tp_rank
        yield length - 2 * rows, rows, *keys
        yield length - rows, rows, *keys
    elif kind in RECURRENT_PARTS and (recurrence := model.recurrence):
        start = 0
        for part, rows in (recurrence.convolved if kind == "conv1d" else recurrence.sections(kind)).items():
            yield start, rows, *((1, 0) if part in recurrence.shared_parts(tp) else (tp, tp_rank))
            start += rows
    elif kind == "gate_up_proj":
        yield 0, length // 2, tp, tp_rank
        yield length // 2, length // 2, tp, tp_rank
    elif kind in BY_ROWS:
        yield 0, length, tp, tp_rank
    else:
        raise ProblemError(Problem(("model",), f"{name}: unknown how vLLM shards tensors of this kind"))


def _part(name: str, shape: tuple[int, ...], dim: int, start: int, length: int, parts: int, part: int) -> Box:
    """Return part `part` of `parts` equal parts of elements [start, start + length) along dimension `dim`."""
    if length % parts:
        raise ProblemError(
            Problem(("rollout.tp",), f"{name} of shape {shape} cannot be cut into {parts} along dimension {dim}")
        )
    step = length // parts
    return cut(shape, dim, start + part * step, start + part * step + step)


def _stacked(
    name: str, shape: tuple[int, ...], model: HfConfig, layout: EngineLayout, worker: _Worker, by_rows: bool
) -> list[Box]:
    """Return the boxes of a tensor of all experts of a block, dim 0. With `by_rows` the output dimension is before the
    input one, and gate above up: [E, 2 I, H] and [E, H, I]. Else the input is first, gate and up interleaved or not."""
    if layout.ep > 1:
        mine = _experts(model, layout, worker)
        return [cut(shape, 0, mine.start, mine.stop)]
    if by_rows:
        dim, sides = (2, 1) if STACKED_DOWN in name or name.endswith("down_proj") else (1, 2)
    elif name.endswith("down_proj_bias"):
        return [whole(shape)]
    else:
        dim = 1 if name.endswith("down_proj") else len(shape) - 1
        sides = 2 if dim > 1 and not model.mixture.interleaved else 1
    length = shape[dim] // sides
    return [_part(name, shape, dim, side * length, length, layout.tp, worker.tp_rank) for side in range(sides)]


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
