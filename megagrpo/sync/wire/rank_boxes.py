"""The inputs of a `p2p` plan: the boxes that each trainer rank holds and each worker wants, and their JSON forms.

Workers get the ranks' boxes in their request, and leave their own boxes in the store (`store_exchange.Store`).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megagrpo.families.shared.boxes import Box
from megagrpo.weights.slices.sync_plan import Sources, Transfers, choose_sources, plan_transfers
from megagrpo.weights.slices.tensor_index import SharedBlock, SharedTensor, TensorIndex

WorkerBoxes = Mapping[str, Sequence[Box]]  # tensor -> the boxes of it that one worker wants


class RankBoxes:
    """All tensors of a policy, in the order of loading, and the ranks that hold each box of them."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], Mapping[Box, Sequence[int]]]]):
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # boxes that the same ranks hold share one tuple

        def shared(ranks: Sequence[int]) -> tuple[int, ...]:
            return known.setdefault(tuple(ranks), tuple(ranks))

        self.tensors = {
            name: (tuple(shape), {box: shared(ranks) for box, ranks in boxes.items()})
            for name, (shape, boxes) in tensors.items()
        }
        self.groups = list(known)

    @cached_property
    def holders(self) -> dict[str, Mapping[Box, tuple[int, ...]]]:
        """Tensor -> box -> the ranks that hold the box."""
        return {name: boxes for name, (_, boxes) in self.tensors.items()}

    def index(self, version: int, dtype: str) -> TensorIndex:
        """Return the index for readers: each block once, however many ranks hold it."""
        tensors = {
            name: SharedTensor(shape, tuple(SharedBlock(ranks[0], "", 0, box, 0) for box, ranks in boxes.items()))
            for name, (shape, boxes) in self.tensors.items()
        }
        return TensorIndex(version, dtype, tensors)

    def sources_for(self, workers: Mapping[int, WorkerBoxes]) -> Sources:
        """Choose the sending ranks for workers (number -> boxes). Raises LookupError for a box that no rank holds."""
        return choose_sources(self.holders, wanted_by(workers, self.tensors))

    def transfers_to(
        self, workers: Mapping[int, WorkerBoxes], sources: Sources | None = None, only: Container[str] | None = None
    ) -> Transfers:
        """Return the plan that sends workers (number -> boxes) their boxes, of the tensors in `only`, or of all.

        Raises LookupError for a box that no rank holds.
        """
        names = self.tensors if only is None else [name for name in self.tensors if name in only]
        return plan_transfers(self.holders, wanted_by(workers, names), sources)

    def choices(self, sources: Sources) -> np.ndarray:
        """Return `sources` as a table [n, 4] int64 of workers, indices of the holders in `groups`, layers, and chosen
        ranks."""
        numbers = {ranks: number for number, ranks in enumerate(self.groups)}
        rows = [
            (worker, number, layer, source)
            for ranks, of_ranks in sources.items()
            for number in [numbers[ranks]]
            for (worker, layer), source in of_ranks.items()
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    def sources(self, choices: np.ndarray) -> Sources:
        """Return the inverse of `choices`."""
        sources: dict[int, dict[tuple[int, int], int]] = {}
        for worker, group, layer, source in choices.tolist():
            sources.setdefault(group, {})[worker, layer] = source
        return {self.groups[group]: of_ranks for group, of_ranks in sources.items()}

    def packed(self) -> str:
        """Return the boxes as text, which `unpacked` reads: compressed JSON."""
        numbers = {ranks: number for number, ranks in enumerate(self.groups)}
        tensors = {
            name: [shape, [(box, numbers[ranks]) for box, ranks in boxes.items()]]
            for name, (shape, boxes) in self.tensors.items()
        }
        return base64.b85encode(zlib.compress(json.dumps([self.groups, tensors]).encode())).decode()

    @staticmethod
    def unpacked(text: str) -> RankBoxes:
        """Return the boxes from their form as text."""
        groups, tensors = json.loads(zlib.decompress(base64.b85decode(text)))
        return RankBoxes(
            {
                name: (shape, {box_of_json(box): groups[number] for box, number in boxes})
                for name, (shape, boxes) in tensors.items()
            }
        )


def box_of_json(data: Any) -> Box:
    """Return the box from its JSON form."""
    lo, hi = data
    return tuple(lo), tuple(hi)


def boxes_of_json(data: Mapping[str, Iterable[Any]]) -> WorkerBoxes:
    """Return the boxes that a worker wants, from their JSON form, which `by_tensor` makes."""
    return {name: [box_of_json(box) for box in boxes] for name, boxes in data.items()}


def by_tensor(boxes: Iterable[tuple[str, Box]]) -> WorkerBoxes:
    """Return the (tensor, box) pairs by tensor, sorted: what a worker leaves in the store."""
    sorted_boxes: dict[str, list[Box]] = {}
    for name, box in sorted(boxes):
        sorted_boxes.setdefault(name, []).append(box)
    return sorted_boxes


def wanted_by(workers: Mapping[int, WorkerBoxes], names: Iterable[str]) -> dict[str, dict[Box, tuple[int, ...]]]:
    """Return tensor -> box -> the workers that want it, in order of `names`, with boxes and workers sorted.

    `workers` is number -> boxes. Alike workers share one object, which is read once for all of them. A part of the
    workers gives the same order, so a worker that knows only its own boxes finds its slices in the sender's order.
    """
    alike: dict[int, tuple[WorkerBoxes, list[int]]] = {}
    for number, boxes in sorted(workers.items()):
        alike.setdefault(id(boxes), (boxes, []))[1].append(number)
    merged: dict[tuple[int, ...], tuple[int, ...]] = {}  # indices into `alike` -> their workers
    kinds = list(alike.values())
    wanted: dict[str, dict[Box, tuple[int, ...]]] = {}
    for name in names:
        of_boxes: dict[Box, list[int]] = {}
        for kind, (boxes, _) in enumerate(kinds):
            for box in boxes.get(name, ()):
                of_boxes.setdefault(box, []).append(kind)
        for box in sorted(of_boxes):
            key = tuple(of_boxes[box])
            if key not in merged:
                merged[key] = tuple(sorted(number for kind in key for number in kinds[kind][1]))
            wanted.setdefault(name, {})[box] = merged[key]
    return wanted
