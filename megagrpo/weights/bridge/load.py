"""Loads a Hugging Face folder into this rank's parameters. Every rank reads only its own slices; no communication."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from megagrpo.families.hf_config import HfConfig, read_raw_config, table_of, untrained
from megagrpo.families.parts.llama_table import EMBEDDING, HEAD
from megagrpo.families.shared.blocks import Block
from megagrpo.families.shared.boxes import brackets
from megagrpo.families.weight_sources import INDEX, SINGLE, weight_files_problem
from megagrpo.platform.parallel.layout import Layout
from megagrpo.platform.process.progress_hook import SILENT, Progress
from megagrpo.platform.process.terminal import warn
from megagrpo.policy.layers.scalar_head import SCORE
from megagrpo.weights.blocks.parameter_blocks import blocks, fill, tensor_names
from megagrpo.weights.files.file_checksums import check_inside
from megagrpo.weights.files.tensor_files import METADATA_KEY, Entry, TensorFile, dtype_name, first_bad, make_header
from megagrpo.weights.precision.stored_views import model_tensors
from megagrpo.weights.slices.sync_plan import layer_of

INV_FREQ = "rotary_emb.inv_freq"
_TIED = (
    "if the embeddings are tied, set tie_word_embeddings to true in config.json; otherwise download the folder again"
)
_OTHER = "config.json and the weights belong to different models, or are incomplete; download the folder again"


@torch.no_grad()
def load_hf(
    chunks: list[nn.Module],
    hf_config: HfConfig,
    folder: str | Path,
    layout: Layout,
    progress: Progress = SILENT,
    scalar: bool = False,
    rows: int | None = None,
) -> Tensor | None:
    """Fill all parameters of `chunks` from safetensors in `folder`, cast to their dtypes. `progress` counts tensors.
    With `scalar` the folder may hold a reward model: its head [H] is returned, and the LM head that it lacks is 0. The
    files have one row per token, or `rows`, of which the last ones are left out.

    Raises ValueError, naming file and tensor, when a file is damaged, or a tensor is missing or of another shape. The
    same error is raised for a tensor without a place on any rank, and for NaN or infinity in this rank's slices.
    """
    parameters = list(blocks(chunks, hf_config, layout))
    checkpoint = Checkpoint(folder)
    head = checkpoint.take_score(hf_config) if scalar else None
    if head is not None and (lm_head := embedding_and_head(hf_config)[1]) not in checkpoint.where:
        unused = [param for _, param, of in parameters if of[0].name == lm_head]
        parameters = [one for one in parameters if one[2][0].name != lm_head]
        for param in unused:
            param.data.zero_()
    checkpoint.check([block for _, _, parameter_blocks in parameters for block in parameter_blocks], hf_config, rows)
    if layout.world_rank == 0:
        checkpoint.check_head(hf_config)
        checkpoint.say_untrained(hf_config)
    with progress.task(f"loading {Path(folder).name}") as task:
        task.expect(len(parameters), "tensors")
        for _, param, parameter_blocks in parameters:
            fill(param, parameter_blocks, checkpoint.read)
            task.advance()
    return head


_ROWS = 4096  # rows compared at once


class Checkpoint:
    """A Hugging Face folder's safetensors, single or sharded. Construction checks all headers; tensors are read on use.

    Raises ValueError when the index or a file is damaged, or when they do not agree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.index: bytes | None = None  # text of the model's index; None for a single file of tensors
        if problem := weight_files_problem(self.folder):
            raise ValueError(f"model: {problem}")
        if (self.folder / INDEX).exists():
            self.index = (self.folder / INDEX).read_bytes()
            self.where = _weight_map(self.folder, self.index)  # tensor name -> file name
            self.files = {file: TensorFile(self.folder / file) for file in sorted(set(self.where.values()))}
        else:
            self.files = {SINGLE: TensorFile(self.folder / SINGLE)}
            self.where = dict.fromkeys(self.files[SINGLE].entries, SINGLE)
        self._check_index()
        self._show_model()

    def _show_model(self) -> None:
        """Replace the tensors of the files by those of the model: `where` and `index` then name no packed ones."""
        stored = {name: one.shape for file in self.files.values() for name, one in file.entries.items()}
        self.stored_where = self.where
        config = self.folder / "config.json"
        raw = read_raw_config(self.folder) if config.is_file() else {}
        self.views, origins = model_tensors(raw, stored, self.stored)
        if not self.views:
            return
        self.where = {name: self.stored_where[origin] for name, origin in origins.items()}
        if self.index is not None:
            total = sum(self.entry(name).nbytes for name in self.where)
            metadata = json.loads(self.index).get("metadata", {}) | {"total_size": total}
            self.index = json.dumps({"metadata": metadata, "weight_map": self.where}, indent=2).encode()

    def headers(self) -> dict[str, bytes]:
        """Return the header of each file that holds only the model's tensors: its own, if it packs none."""
        if not self.views:
            return {name: file.header for name, file in self.files.items()}
        tensors: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for name, file in self.where.items():
            entry = self.entry(name)
            tensors.setdefault(file, {})[name] = entry.dtype, entry.shape
        metadata = {file: json.loads(self.files[file].header).get(METADATA_KEY) for file in tensors}
        return {file: make_header(tensors[file], metadata[file]) for file in sorted(tensors)}

    def _check_index(self) -> None:
        fix = f"{INDEX} and the files belong to different models; download the folder again"
        for name, file in self.where.items():
            if name not in self.files[file].entries:
                raise ValueError(f"model: {self.folder / INDEX} names {file} for {name}, but the file lacks it; {fix}")
        for file, opened in self.files.items():
            if extra := [name for name in opened.entries if self.where.get(name) != file]:
                holds = f"{self.folder / file} holds {_list(extra)}, which {INDEX} does not list for this file"
                raise ValueError(f"model: {holds}; {fix}")

    def take_score(self, hf_config: HfConfig) -> Tensor | None:
        """Return the head [H] of a reward model, and forget it as a tensor of the files; None for another model. Raises
        ValueError for a head with another number of scores than one."""
        if SCORE not in self.where:
            return None
        score, shape = self.tensor(SCORE).float(), (1, hf_config.hidden_size)
        if score.shape != shape or not score.isfinite().all():
            what = "holds NaN or infinity" if score.shape == shape else f"has shape {tuple(score.shape)}, not {shape}"
            raise ValueError(f"model: {SCORE} in {self.folder / self.where[SCORE]} {what}; a critic needs one score")
        self.where = {name: file for name, file in self.where.items() if name != SCORE}
        return score[0]

    def check(self, wanted: list[Block], hf_config: HfConfig, rows: int | None = None) -> None:
        """Raises ValueError when the tensor of a block in `wanted` is missing, quantized or of another shape, where
        embeddings and head have `rows`, if given.

        Also raises ValueError if a tensor on disk has no place in the model on any rank, unless it is `untrained`.
        """
        _raise_first(self._name_problems({block.name for block in wanted}, hf_config))
        of_tokens = embedding_and_head(hf_config) if rows else ()
        shapes = {b.name: (rows, *b.shape[1:]) if b.name in of_tokens and rows else b.shape for b in wanted}
        _raise_first(problem for name, shape in shapes.items() for problem in self._tensor_problems(name, shape))

    def check_all(self, hf_config: HfConfig) -> None:
        """Raises ValueError when any tensor of the model is missing, a tensor on disk has no place in the model, or the
        head differs from embeddings that are tied to it."""
        _raise_first(self._name_problems(_needed(hf_config), hf_config))
        self.check_head(hf_config)

    def check_head(self, hf_config: HfConfig) -> None:
        """Raises ValueError if config.json ties the embeddings but the files' LM head differs. Reads both tensors."""
        _raise_first(self._head_problems(hf_config))

    def _head_problems(self, hf_config: HfConfig) -> Iterator[str]:
        embedding, own_head = embedding_and_head(hf_config)
        if not hf_config.tied_embeddings or not {own_head, embedding} <= self.where.keys():
            return
        one, other = self.tensor(embedding), self.tensor(own_head)
        pairs = zip(one.split(_ROWS), other.split(_ROWS), strict=False)
        if one.shape != other.shape or not all(torch.equal(a.float(), b.float()) for a, b in pairs):
            head = f"{own_head} in {self.folder / self.where[own_head]}"
            yield (
                f"{head} differs from {embedding}, but config.json ties them; set tie_word_embeddings to false "
                "in config.json, or remove the tensor if the head is a leftover"
            )

    def _name_problems(self, needed: set[str], hf_config: HfConfig) -> Iterator[str]:
        missing = sorted(needed - set(self.where))
        unused = sorted(set(self.where) - tensor_names(hf_config) - set(self.untrained(hf_config)))
        if missing:
            fix = _TIED if missing == [embedding_and_head(hf_config)[1]] else _OTHER
            yield f"{self.folder} lacks {_list(missing)}; {fix}"
        if unused:
            yield f"{self.folder} holds {_list(unused)}, which this architecture does not use; {_OTHER}"

    def untrained(self, hf_config: HfConfig) -> list[str]:
        """Return the tensors that stay as loaded: `untrained_names` of the files."""
        return untrained_names(self.where, hf_config)

    def say_untrained(self, hf_config: HfConfig) -> None:
        """Warn on stderr about the tensors that are not trained."""
        if names := [name for name in self.untrained(hf_config) if not name.endswith(INV_FREQ)]:
            warn(f"model: kept as loaded, not trained: {counted(names)} ({self.folder})")
        if packed := [name for name, view in self.views.items() if view.dtype]:
            dtypes = ", ".join(sorted({dtype_name(self.entry(name).dtype) for name in packed}))
            warn(
                f"model: dequantized to {dtypes} from {self.folder}, for training, exports and vLLM: {counted(packed)}"
            )

    def entry(self, name: str) -> Entry:
        """Return dtype and shape of a tensor; for a packed one, those that it is computed in."""
        if view := self.views.get(name):
            first = view.parts[0]
            dtype = view.dtype or self.files[self.stored_where[first]].entries[first].dtype
            return Entry(dtype, view.shape, 0, math.prod(view.shape) * dtype.itemsize)
        return self.files[self.where[name]].entries[name]

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor: a read-only view of its file, or computed from packed ones."""
        if view := self.views.get(name):
            return view.whole(self.stored)
        return self.stored(name)

    def stored(self, name: str) -> Tensor:
        """Return a tensor of the files in its stored shape and dtype: a read-only view of its file."""
        return self.files[self.stored_where[name]].tensor(name)

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor as stored."""
        return self.tensor(name).reshape(-1).view(torch.uint8).numpy().data

    def _tensor_problems(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        entry, file = self.entry(name), self.folder / self.where[name]
        if entry.shape != shape:
            shapes = f"has shape {entry.shape}; config.json implies {shape}"
            yield f"{name} in {file} {shapes}; they belong to different models"
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            yield f"{name} in {file} is {entry.dtype}, quantized; use the original weights"

    def read(self, block: Block) -> Tensor:
        """Return a checked block [block_shape] in the dtype of `entry`: a read-only view of the file, or computed from
        packed tensors. Raises ValueError for NaN or infinity in it."""
        view = self.views.get(block.name)
        part = view.read(self.stored, block.slices) if view else self.stored(block.name)[block.slices]
        if bad := first_bad(part):
            where = f"{block.name} in {self.folder / self.where[block.name]}"
            what = f"holds {bad} of the part {brackets(block.box)}"
            raise ValueError(f"model: {where} {what}; the weights are broken: use another checkpoint")
        return part


def untrained_names(names: Iterable[str], hf_config: HfConfig) -> list[str]:
    """Return those of `names`, of the tensors in a model's files, that exports keep as loaded: tensors that the family
    does not train, and rotary frequencies, which are computed from config.json."""
    is_untrained = untrained(hf_config)
    others = sorted(set(names) - tensor_names(hf_config))
    return [name for name in others if name.endswith(INV_FREQ) or is_untrained(name)]


def _needed(hf_config: HfConfig) -> set[str]:
    """Return the tensors that files of the whole model must hold."""
    return tensor_names(hf_config) - ({embedding_and_head(hf_config)[1]} if hf_config.tied_embeddings else set())


def embedding_and_head(hf_config: HfConfig) -> tuple[str, str]:
    """Return the names of the embeddings and the LM head in files; the head's also if it is tied."""
    table = table_of(hf_config)
    return table[EMBEDDING].names[0], table[HEAD].names[0]


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ValueError(f"model: {problem}")


def _weight_map(folder: Path, index: bytes) -> dict[str, str]:
    try:
        files = json.loads(index)["weight_map"]
        names = sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model: {folder / INDEX} is corrupt: {error!r}; download it again") from None
    check_inside(names, folder / INDEX)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"model: {folder} lacks {_list(absent)}, named in {INDEX}; download the missing files")
    return files


def counted(names: list[str]) -> str:
    """Return text with the number of tensors, their layers, and the first five names."""
    layers = sorted({layer_of(name) for name in names} - {-1})
    of_layers = f" of layer{'s' * (len(layers) > 1)} {_list([*map(str, layers)])}" if layers else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)}{of_layers}: {_list(names)}"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
