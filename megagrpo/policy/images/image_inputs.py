"""Images in the policy: transformers' vision tower gives the rows that replace the embeddings of image tokens
and those that the first decoder blocks add to their outputs. The rotation has positions on three axes, or the tokens of
an image see each other in both directions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megagrpo.config import RunConfig
from megagrpo.families.hf_config import HfConfig
from megagrpo.families.shared.vision import TOWER
from megagrpo.platform import device
from megagrpo.platform.parallel.context import rank_indices
from megagrpo.platform.parallel.layout import Layout
from megagrpo.policy.attention.packed import TorchAttention
from megagrpo.policy.layers.megatron_modules import layers_of
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK
from megagrpo.train_types import MicroBatch, moved


class ModelInputs(Protocol):
    """What a policy reads besides token ids."""

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Prepare a pass over these micro-batches of the host."""

    def give(self, chunk: Any, micro_batch: MicroBatch, packed: PackedSeqParams) -> None:
        """Give the inputs of a micro-batch of the host to a chunk and to its pack, just before the forward pass."""


class TokensOnly:
    """A policy of text."""

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Raise ValueError for a micro-batch with `inputs`."""
        if names := sorted({name for m in micro_batches for of_sample in m.inputs for name in of_sample}):
            raise ValueError(f"Prompt.inputs: the policy reads token ids only, and a prompt has {', '.join(names)}")

    def give(self, chunk: Any, micro_batch: MicroBatch, packed: PackedSeqParams) -> None:
        """Do nothing."""


class ImageInputs:
    """The images of a policy's micro-batches (`data.images.PromptImages`), on this rank.

    Ranks whose chunks embed tokens, or have decoder blocks that add rows, hold the whole tower and compute the rows of
    the images in their own samples. The rows of an image stay on the host as long as passes have it; those of a trained
    tower only while their micro-batch runs. All stages need positions, which grids determine.
    """

    def __init__(self, chunks: Sequence[nn.Module], hf_config: HfConfig, layout: Layout):
        assert hf_config.vision is not None, f"{hf_config.family} has no tower"
        self._vision, self._layout = hf_config.vision, layout
        # frozen: set by `models.bridge.tower.load_tower` where `reads_pixels`
        self.tower: Any = next((getattr(chunk, TOWER) for chunk in chunks if hasattr(chunk, TOWER)), None)
        # id of the inputs -> (they, rows [1 + levels, n, H]), on the host if the tower is frozen
        self._rows: dict[int, tuple[Mapping[str, Any], Tensor]] = {}
        self._seeing = {id(chunk) for chunk in chunks if _hook(chunk, hf_config.vision.levels)}
        cores = [m.core_attention for chunk in chunks for m in chunk.modules() if hasattr(m, "core_attention")]
        assert not self._vision.square or all(isinstance(core, TorchAttention) for core in cores), (
            "Transformer Engine's attention would be causal inside images"
        )

    @property
    def reads_pixels(self) -> bool:
        """Whether this rank computes rows of images."""
        return bool(self._seeing)

    @property
    def trains_tower(self) -> bool:
        """Whether the tower is one of the policy's trained weights."""
        return bool(self._vision.trained)

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Drop the rows of images that this pass does not have."""
        current = {id(inputs) for m in micro_batches for inputs in m.inputs}
        self._rows = {key: rows for key, rows in self._rows.items() if key in current}

    def give(self, chunk: Any, micro_batch: MicroBatch, packed: PackedSeqParams) -> None:
        """Set the rows of `chunk`, and the pack's positions on the axes or the last token that each one sees.
        Recomputation reads them from the pack. Raises ValueError when a shared prompt ends inside an image."""
        model: Any = unwrap_model(chunk)
        own = rank_indices(micro_batch.cu_seqlens, self._layout.parallel.cp, self._layout.cp_rank)
        seen = micro_batch.inputs or (self.trains_tower and torch.is_grad_enabled())
        packed.image_rows = self._placed(micro_batch, own) if seen and id(model) in self._seeing else None
        if hasattr(model, "embedding"):
            model.embedding.image_rows = packed.image_rows
        if micro_batch.inputs and self._vision.square:
            packed.last_seen = last_seen(micro_batch)
        if micro_batch.inputs and self._vision.axes:
            positions = axis_positions(micro_batch, self._vision.merge)[:, own]
            packed.axis_positions = moved(positions, device.device())

    def _placed(self, micro_batch: MicroBatch, own: Tensor) -> ImageRows:
        """Return the rows of the image tokens among this rank's embeddings. `own` [T/cp] int64 are the pack positions
        of the tokens that this context-parallel rank holds."""
        if self.trains_tower:
            self._rows = {}
        at, rows = [torch.zeros(0, dtype=torch.int64)], list[Tensor]()
        for first, inputs, index in _sequences(micro_batch):
            of_image = image_tokens(inputs)
            inside = (of_image >= index[0]) & (of_image <= index[-1])
            at.append(of_image[inside] - index[0] + first)
            rows.append(self._rows_of(inputs)[:, inside])
        rows = rows or [self._blank_rows()]
        # a rank embeds T/cp tokens, or with sequence parallelism T/cp/tp neighbours of these
        parts = self._layout.parallel.tp if self._layout.parallel.sequence_parallel else 1
        embedded = own.chunk(parts)[self._layout.tp_rank if parts > 1 else 0]
        index = torch.full((micro_batch.num_tokens,), -1).index_copy(0, embedded, torch.arange(len(embedded)))
        places = index[torch.cat(at)]
        places, every = places[places >= 0], torch.cat(rows, 1)[:, places >= 0]
        return ImageRows.of(moved(places, device.device()), moved(every, device.device()))

    def _rows_of(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rows [1 + levels, n, H] of all images of a prompt."""
        if id(inputs) not in self._rows:
            pixels, grids = torch.as_tensor(inputs["pixel_values"]), torch.as_tensor(inputs["image_grid_thw"])
            with torch.set_grad_enabled(self.trains_tower and torch.is_grad_enabled()):
                rows = self._computed(pixels, grids)
            self._rows[id(inputs)] = inputs, rows if self.trains_tower else rows.cpu()
        return self._rows[id(inputs)][1]

    def _blank_rows(self) -> Tensor:
        """Return rows [1 + levels, 0, H] whose gradients reach all weights of a trained tower, as zeros.

        An overlapped reduction waits for the gradients of all weights, in the same order on all ranks. So a
        micro-batch without images runs the tower on a blank image, of one token if sizes differ.
        """
        if (square := self._vision.square) is not None:
            pixels, side = torch.zeros(1, 3, square.pixels, square.pixels), square.patches
        else:
            side = self._vision.merge
            pixels = torch.zeros(side**2, self.tower.patch_embed.proj.weight[0].numel())
        return self._computed(pixels, torch.tensor([[1, side, side]]))[:, :0]

    def _computed(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Return the rows [1 + levels, n, H] of images with `pixel_values` and `image_grid_thw`."""
        assert self.tower is not None, "load_tower has not run"
        weight = next(self.tower.parameters())
        found = self.tower(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
        levels = found.deepstack_features if self._vision.levels else []
        return torch.stack([found.pooler_output, *levels])


def _hook(chunk: Any, levels: int) -> bool:
    """Make the embedding of a bare chunk and its first decoder blocks take rows; return whether the chunk has any."""
    if embeds := hasattr(chunk, "embedding"):
        chunk.embedding.image_rows = None
        chunk.embedding.register_forward_hook(_replace_rows)
    ends = {LAYERS_PER_BLOCK * level: level for level in range(1, levels + 1)}  # number of a block's last layer
    adding = [layer for layer in layers_of([chunk]) if layer.layer_number in ends]
    for layer in adding:
        layer.register_forward_hook(partial(_add_rows, ends[layer.layer_number]), with_kwargs=True)
    return embeds or bool(adding)


def _replace_rows(embedding: Any, inputs: Any, output: Tensor) -> Tensor | None:
    """A forward hook: put the image rows into embeddings [T, 1, H], or [T/tp, 1, H]."""
    images: ImageRows | None = embedding.image_rows
    return None if images is None else images.replace(output)


def _add_rows(level: int, layer: Any, inputs: Any, keywords: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """A forward hook of a block's last layer: add `level`'s rows to the hidden states [T, 1, H], or [T/tp, 1, H]."""
    images: ImageRows | None = getattr(keywords["packed_seq_params"], "image_rows", None)
    if images is None:
        return output
    hidden, context = output
    return images.add(level, hidden), context


def build_tower(hf_config: HfConfig, dtype: torch.dtype) -> nn.Module:
    """Return transformers' tower of the model, frozen, on this rank's device, without weights."""
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert hf_config.vision is not None and hf_config.wrapper is not None, f"{hf_config.family} has no tower"
    kind = hf_config.wrapper.model_type
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    config: Any = CONFIG_MAPPING[kind].from_dict(hf_config.vision.config)
    with no_init_weights():
        make, square = getattr(module, hf_config.vision.tower), hf_config.vision.square
        tower: nn.Module = make(config.vision_config) if square is None else SquareTower(config, make)
    for parameter in tower.parameters():  # buffers with rotary frequencies stay in float32, as in transformers
        parameter.data = parameter.data.to(dtype)
    tower.eval().requires_grad_(False)
    # fake and meta tensors, of which only the structure is needed, cannot be moved
    has_data = not any(isinstance(p, FakeTensor) or p.is_meta for p in tower.parameters())
    return tower.to(device.device()) if has_data else tower


def image_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return the indices [n] int64 of a prompt's image tokens, in order."""
    spans = zip(inputs["image_starts"].tolist(), inputs["image_tokens"].tolist(), strict=True)
    return torch.cat([start + torch.arange(count) for start, count in spans])


def last_seen(micro_batch: MicroBatch) -> Tensor:
    """Return [T] int64: the position in its sample of the last token that each token of a micro-batch sees. For a token
    of an image it is the image's last one. Raises ValueError for an image that is in two sequences."""
    last = micro_batch.position_ids.clone()
    for first, inputs, index in _sequences(micro_batch):
        begins, counts = torch.as_tensor(inputs["image_starts"]), torch.as_tensor(inputs["image_tokens"])
        for begin, end in zip(begins.tolist(), (begins + counts).tolist(), strict=True):
            inside = (index >= begin) & (index < end)
            if 0 < int(inside.sum()) < end - begin:
                raise ValueError(
                    "train.share_prompts: the part of a prompt that samples share ends inside an image (tokens "
                    f"{begin} to {end - 1}), as context parallelism pads it; set it to false"
                )
            last[first : first + len(index)][inside] = end - 1
    return last


def shares_prompts(config: RunConfig, hf_config: HfConfig) -> bool:
    """Whether the policy's samples may share prompts. By default they do not where the shared part is padded, which
    could cut an image whose tokens see each other."""
    padded = config.parallel.sequence_align > 1 and config.train.share_prompts is None
    shares = config.shares_prompts(device.has_transformer_engine())
    return shares and not (padded and config.data.images and hf_config.vision and hf_config.vision.square)


def axis_positions(micro_batch: MicroBatch, merge: int) -> Tensor:
    """Return the positions [3, T] int64 of a micro-batch of the host, over time, height and width. Those of samples
    without images are equal."""
    positions = micro_batch.position_ids.expand(3, -1).clone()
    for first, inputs, index in _sequences(micro_batch):
        known, shift = _prompt_positions(inputs, merge)
        last = known.shape[1]
        of_images = known[:, index.clamp(max=last - 1)]
        positions[:, first : first + index.numel()] = torch.where(index < last, of_images, index + shift)
    return positions


def _prompt_positions(inputs: Mapping[str, Any], merge: int) -> tuple[Tensor, int]:
    """Return the positions [3, L] of a prompt's tokens up to the end of its last image, and what is added to the index
    of each later token."""
    parts, tokens, position = [], 0, 0
    grids = inputs["image_grid_thw"].tolist()
    for start, (time, tall, wide) in zip(inputs["image_starts"].tolist(), grids, strict=True):
        text = torch.arange(start - tokens).expand(3, -1) + position
        position += start - tokens
        rows, columns = tall // merge, wide // merge
        cells = torch.cartesian_prod(torch.arange(time), torch.arange(rows), torch.arange(columns)).view(-1, 3)
        parts += [text, cells.t() + position]
        tokens, position = start + len(cells), position + max(rows, columns)
    return torch.cat(parts, 1), position - tokens


def _sequences(micro_batch: MicroBatch) -> list[tuple[int, Mapping[str, Any], Tensor]]:
    """Return (first token in the pack, inputs, indices of the tokens in the sample) of each sequence with inputs."""
    borders = list(pairwise(micro_batch.cu_seqlens.tolist()))
    pairs = zip(borders, micro_batch.inputs or [{}] * len(borders), strict=True)
    return [(a, inputs, micro_batch.position_ids[a:b]) for (a, b), inputs in pairs if inputs and b > a]


def inputs_of(chunks: Sequence[nn.Module], hf_config: HfConfig, layout: Layout, images: bool) -> ModelInputs:
    """Return what the policy reads besides token ids: `images`, if the model has a tower, or nothing. `megagrpo verify`
    makes models without one."""
    return ImageInputs(chunks, hf_config, layout) if images and hf_config.vision is not None else TokensOnly()


class SquareTower(nn.Module):
    """transformers' modules of a whole model's configuration, with their names there. `projector` is the class of the
    second one."""

    def __init__(self, config: Any, projector: Callable[[Any], nn.Module]):
        from transformers import AutoModel

        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = projector(config)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """Return an object with the rows [n, H] of images [k, 3, height, width], `pooler_output`, as towers of
        transformers do. All images have one grid."""
        made = self.vision_tower(pixel_values=pixels)
        made.pooler_output = self.multi_modal_projector(made.last_hidden_state).flatten(0, 1)
        return made


@dataclass(frozen=True, eq=False)
class ImageRows:
    """The `rows` [1 + levels, n, H] of images and the indices `at` [n] int64 of their tokens among those of this rank.
    Rows of a trained tower require gradients, which are collected in `gradients` [1 + levels, n, H].

    Rows replace embeddings, and are added to hidden states of the first decoder blocks. Recomputed blocks run a
    backward pass of their own, so blocks do not take the rows from autograd's graph: each keeps its gradient, and the
    embedding passes all of them to the tower.
    """

    at: Tensor
    rows: Tensor
    gradients: Tensor

    @classmethod
    def of(cls, at: Tensor, rows: Tensor) -> ImageRows:
        """Return the rows, with gradients of 0."""
        return cls(at, rows, torch.zeros_like(rows) if rows.requires_grad else rows.new_zeros(0))

    def level(self, level: int, dtype: torch.dtype) -> Tensor:
        """Return the rows [n, 1, H] of a level, without a graph."""
        return self.rows.detach()[level, :, None].to(dtype)

    def replace(self, embeddings: Tensor) -> Tensor:
        """Return embeddings [T, 1, H], or [T/tp, 1, H], with the rows of level 0 in place of those of image tokens."""
        replaced: Tensor = _Replaced.apply(embeddings, self.rows, self)
        return replaced

    def add(self, level: int, hidden: Tensor) -> Tensor:
        """Return hidden states [T, 1, H], or [T/tp, 1, H], with the rows of `level` added at image tokens."""
        added: Tensor = _Added.apply(hidden, self, level)
        return added


class _Replaced(torch.autograd.Function):
    """`ImageRows.replace`. Its backward pass follows those of all blocks."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, rows: Tensor, images: ImageRows) -> Tensor:
        ctx.images = images
        return embeddings.index_copy(0, images.at, images.level(0, embeddings.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        images = ctx.images
        if images.rows.requires_grad:
            images.gradients[0] = grad[images.at, 0]
        return grad.index_fill(0, images.at, 0), images.gradients if images.rows.requires_grad else None, None


class _Added(torch.autograd.Function):
    """`ImageRows.add`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, images: ImageRows, level: int) -> Tensor:
        ctx.images, ctx.level = images, level
        return hidden.index_add(0, images.at, images.level(level, hidden.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        images = ctx.images
        if images.rows.requires_grad:
            images.gradients[ctx.level] = grad[images.at, 0]
        return grad, None, None
