"""Weights of AWQ and GPTQ: int32 words of several codes (`qweight`), packed zero points (`qzeros`) and a scale per
output and group of inputs (`scales`). Their tensors are [inputs, outputs], the model's are [outputs, inputs]. Computed
as the kernels of AutoAWQ and GPTQModel do: (code - zero point) * scale in the scales' dtype, then in config.json's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagrpo.families.shared.precisions import QUANTIZATION
from megagrpo.weights.precision.view import Get, Scaled, Slices, Stored, View, groups

_WORD = 32  # bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in the word of each of 8 neighbouring codes
_CODES, _ZEROS, _SCALES, _ORDER = "qweight", "qzeros", "scales", "g_idx"


def awq_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight of AWQ (GEMM layout). Raises ValueError when tensors do not fit it."""
    return _views(config, stored, dtype, along_inputs=False, order=_AWQ_ORDER, added=0, symmetric=False)


def gptq_views(config: dict[str, Any], stored: Stored, dtype: torch.dtype) -> dict[str, View]:
    """Return a view in `dtype` per weight of GPTQ. Raises ValueError when tensors do not fit its layout."""
    added = 0 if config.get("checkpoint_format") == "gptq_v2" else 1  # the first version stores zero points less 1
    layout = dict(along_inputs=True, order=tuple(range(_WORD // config["bits"])), added=added)
    return _views(config, stored, dtype, **layout, symmetric=bool(config.get("sym")))


def _views(config: dict[str, Any], stored: Stored, dtype: torch.dtype, **layout: Any) -> dict[str, View]:
    views = {}
    for codes, words in stored.items():
        module, _, last = codes.rpartition(".")
        if last != _CODES:
            continue
        parts = [codes, *(name for one in (_ZEROS, _SCALES, _ORDER) if (name := f"{module}.{one}") in stored)]
        lacks = {f"{module}.{one}" for one in (_ZEROS, _SCALES)} - stored.keys()
        if lacks:
            raise ValueError(f"model: the files lack {min(lacks)} beside {codes}; download the folder again")
        per_word = _WORD // config["bits"]
        grid, zeros = stored[f"{module}.{_SCALES}"], stored[f"{module}.{_ZEROS}"]
        inputs = words[0] * per_word if layout["along_inputs"] else words[0]
        outputs = words[1] if layout["along_inputs"] else words[1] * per_word
        size = config.get("group_size", -1)
        size = inputs if size == -1 else size
        expected = -(-inputs // size), outputs
        if grid != expected or zeros != (expected[0], outputs // per_word):
            raise ValueError(
                f"model: {module} has scales of shape {grid} and zero points of shape {zeros}, but its {words} words "
                f"need scales of shape {expected}; quantization_config belongs to another model"
            )
        matrix = _Matrix(
            module, (outputs, inputs), size, config["bits"], f"{module}.{_ORDER}" in stored, dtype, **layout
        )
        views[f"{module}.weight"] = View(dtype, (outputs, inputs), tuple(parts), matrix.read)
    return views


@dataclass(frozen=True)
class _Matrix:
    """One weight [outputs, inputs] of `module`, with a scale per output and `size` inputs. Words hold codes of
    neighbouring inputs or outputs, code i of a word at place `order[i]`; `added` belongs to each zero point. Those of
    `symmetric` weights are all half of the codes."""

    module: str
    shape: tuple[int, int]
    size: int
    bits: int
    ordered: bool  # the files name the group of each input
    dtype: torch.dtype
    along_inputs: bool
    order: tuple[int, ...]
    added: int
    symmetric: bool

    def read(self, get: Get, slices: Slices) -> Tensor:
        """Return the box `slices`."""
        rows, columns = slices
        words, per_word = get(f"{self.module}.{_CODES}").T, len(self.order)  # [outputs, inputs], one of them in words

        def codes(part: slice) -> Tensor:
            own = slice(rows.start + part.start, rows.start + part.stop)
            packed = columns if self.along_inputs else own
            first = packed.start // per_word
            held, places = slice(first, -(-packed.stop // per_word)), slice(packed.start - first * per_word, None)
            count = packed.stop - packed.start
            if self.along_inputs:
                return self._unpacked(words[own, held])[:, places][:, :count]
            return self._unpacked(words[held, columns].T).T[places][:count]

        zeros = self._zeros(get)
        order = get(f"{self.module}.{_ORDER}")[columns].long() if self.ordered else groups(columns, self.size)
        scales = get(f"{self.module}.{_SCALES}").T
        return Scaled(codes, scales, groups(rows, 1), order, scales.dtype, zeros.T).compute(self.dtype)

    def _zeros(self, get: Get) -> Tensor:
        """Return the zero points [groups, outputs]. Raises ValueError when those of symmetric weights are not half of
        the codes. Some files name the first version of GPTQ and have the second's zero points: half decides then."""
        stored, half = self._unpacked(get(f"{self.module}.{_ZEROS}")), 2 ** (self.bits - 1)
        if not self.symmetric:
            return stored + self.added & 2**self.bits - 1
        if not ((stored == half) | (stored + 1 == half)).all():
            said = f"{self.module}.{_ZEROS} has zero points other than {half}, but {QUANTIZATION} has sym=true"
            raise ValueError(f"model: {said}; use the original weights")
        return torch.full_like(stored, half)

    def _unpacked(self, words: Tensor) -> Tensor:
        """Return the codes [rows, columns x codes per word] of words [rows, columns]."""
        shifts = torch.tensor(self.order, dtype=torch.int32) * self.bits
        return (words[..., None] >> shifts & 2**self.bits - 1).flatten(-2).to(torch.uint8)
