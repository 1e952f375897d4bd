"""Experts as transformers 5 holds them in memory and saves them with `save_original_format=False`: a block has
`experts.gate_up_proj` [experts, 2 x width, hidden] and `experts.down_proj` [experts, hidden, width]. Families whose own
files have the same names with the last two dimensions swapped (Qwen3-VL) get the swapped view."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.hf_config import HfConfig, parse_hf_config, table_of
from megagrpo.families.shared.blocks import BlockRule, Local, named
from megagrpo.families.shared.family import Table
from megagrpo.families.shared.wrapper import NAMINGS
from megagrpo.weights.precision.view import Get, Slices, Stored, View

_DECODERS = "|".join(re.escape(naming.decoder) for naming in NAMINGS)
FUSED_EXPERTS = re.compile(rf"(?:{_DECODERS})layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)")
_EXPERTS = {"gate_up_proj": "mlp.experts.linear_fc1.weight", "down_proj": "mlp.experts.linear_fc2.weight"}
# Names of transformers' other parameters in such blocks -> the parameter in the families' tables.
_BESIDE = {
    "mlp.gate.weight": "mlp.router.weight",
    "block_sparse_moe.router.weight": "mlp.router.weight",
    "mlp.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "mlp.router.expert_bias",
}


def fused_views(raw: dict[str, Any], stored: Stored) -> dict[str, View]:
    """Return a view per tensor that the family names in another way; empty when files hold no fused experts."""
    fused = [match for match in map(FUSED_EXPERTS.fullmatch, stored) if match]
    if not fused or architecture_problems(raw):
        return {}
    hf_config = parse_hf_config(raw, stored)
    table = table_of(hf_config)
    views: dict[str, View] = {}
    for match in fused:
        views |= _of_experts(match[0], int(match[1]), table[_EXPERTS[match[2]]], stored[match[0]])
        views |= _swapped(match[0], table[_EXPERTS[match[2]]], stored[match[0]], hf_config)
    for layer in {int(match[1]) for match in fused}:
        views |= _beside(hf_config.file_names.of(f"model.layers.{layer}."), layer, table, stored)
    return {name: view for name, view in views.items() if view.shape != stored.get(name)}


def _swapped(fused: str, rule: BlockRule, shape: tuple[int, ...], hf_config: HfConfig) -> dict[str, View]:
    """Return the view of a tensor [experts, ...] in the family's shape, if that has the last two dimensions swapped."""
    width, hidden = hf_config.mixture.intermediate_size, hf_config.hidden_size
    of_one = (2 * width, hidden) if fused.endswith("gate_up_proj") else (hidden, width)
    wanted = rule.blocks(Local(SimpleNamespace(shape=of_one), 1, 0, hf_config, expert=0))[0].shape
    fits = fused.endswith(rule.names[0].rpartition(".")[2]) and wanted != shape == (*wanted[:-2], *wanted[:-3:-1])
    return {fused: View(None, wanted, (fused,), partial(_turned, fused))} if fits else {}


def _of_experts(fused: str, layer: int, rule: BlockRule, shape: tuple[int, ...]) -> Iterator[tuple[str, View]]:
    """Yield the views of one fused tensor; the tensors of an expert are `rule.names`, one above the other."""
    patterns = rule.names
    if "{E}" not in patterns[0]:
        yield named(patterns[0], layer, None), View(None, shape, (fused,), partial(_whole, fused))
        return
    experts, rows, columns = shape
    rows //= len(patterns)
    for expert in range(experts):
        for i, pattern in enumerate(patterns):
            read = partial(_read, fused, expert, i * rows)
            yield named(pattern, layer, expert), View(None, (rows, columns), (fused,), read)


def _beside(block: str, layer: int, table: Table, stored: Stored) -> Iterator[tuple[str, View]]:
    for theirs, ours in _BESIDE.items():
        name = block + theirs
        if name in stored and ours in table:
            yield named(table[ours].names[0], layer, None), View(None, stored[name], (name,), partial(_whole, name))


def _turned(name: str, get: Get, slices: Slices) -> Tensor:
    return get(name).transpose(-1, -2)[slices]


def _whole(name: str, get: Get, slices: Slices) -> Tensor:
    return get(name)[slices]


def _read(name: str, expert: int, first: int, get: Get, slices: Slices) -> Tensor:
    rows, columns = slices
    return get(name)[expert, first + rows.start : first + rows.stop, columns]
