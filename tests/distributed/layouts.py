"""The layouts and options whose step must equal one process's step, and the rules for combining them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from covering import Row, Rule, cheaper, covering_rows
from tiny_policy import SHAPES, tiny_run

from megagrpo.config import RunConfig
from megagrpo.data.packing.sample_packing import padded

MAX_RANKS = 8
LOSSES = {
    "grpo": dict(loss_type="grpo", beta=0.1),
    "dapo": dict(loss_type="dapo", beta=0.0),
    "dr_grpo_full_reverse": dict(loss_type="dr_grpo", beta=0.1, kl_estimator="full_reverse"),
    "bnpo_corrected_k1": dict(loss_type="bnpo", beta=0.1, kl_estimator="k1", use_bias_correction_kl=True),
    "dapo_full_forward": dict(loss_type="dapo", beta=0.1, kl_estimator="full_forward"),
}
EXPERTS = ("qwen3_moe", "mixtral")
# Their order decides the number of rows: this one gives few.
AXES: dict[str, list[Any]] = {
    "model": list(SHAPES),
    "dp": [1, 2, 3],
    "cp": [1, 2],
    "distributed_optimizer": [False, True],
    "sequence_parallel": [False, True],
    "vpp": [1, 2],
    "recompute": ["none", "selective", "full"],
    "uneven_stages": [False, True],
    "share_prompts": [False, True],
    "budget": ["roomy", "tight"],  # tokens of a micro-batch: two of the longest sample, or exactly one
    "pp": [1, 2, 3, 4],
    "tp": [1, 2, 3],
    "etp": [None, 1, 2],
    "loss": list(LOSSES),
    "ep": [1, 2],
}
UNEVEN = {2: [1, 3], 3: [1, 2, 1]}  # the models have four layers
PARALLEL = ("tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel")
RULES: list[Rule] = [
    (("tp", "pp", "cp", "dp"), lambda tp, pp, cp, dp: tp * pp * cp * dp <= MAX_RANKS),
    (("pp", "vpp"), lambda pp, vpp: vpp == 1 or pp == 2),
    (("pp", "vpp", "uneven_stages"), lambda pp, vpp, uneven: vpp == 1 and pp in UNEVEN if uneven else pp != 3),
    (("tp", "sequence_parallel"), lambda tp, sequence_parallel: tp > 1 or not sequence_parallel),
    (("model", "ep", "etp"), lambda model, ep, etp: model in EXPERTS or (ep == 1 and etp is None)),
    (
        ("model", "tp", "sequence_parallel"),
        lambda model, tp, sequence_parallel: model not in EXPERTS or tp == 1 or sequence_parallel,
    ),
    (("tp", "cp", "dp", "ep", "etp"), lambda tp, cp, dp, ep, etp: tp * cp * dp % (ep * (etp or tp)) == 0),
]


@functools.cache
def covering_layouts(strength: int = 2) -> list[Row]:
    """Rows on few ranks that contain every allowed combination of `strength` axis values."""
    return cheaper(covering_rows(AXES, RULES, strength), AXES, RULES, ranks, strength)


def parametrize_rows(metafunc: pytest.Metafunc, strength: int = 2, models: Sequence[str] = tuple(SHAPES)) -> None:
    """Give a test that takes a `row`, of the full suite, a case for each row with one of `models`. A suite without it
    has no case: the rows take time to compute."""
    if "row" in metafunc.fixturenames:
        left_out = "not full" in metafunc.config.option.markexpr
        found = [] if left_out else [row for row in covering_layouts(strength) if row["model"] in models]
        metafunc.parametrize("row", found, ids=name)


def name(row: Row) -> str:
    """The values that differ from each axis's first one: `qwen3_tied-dp3-sequence_parallel-recompute_full-tp2`."""
    words = [row["model"]]
    for axis, values in list(AXES.items())[1:]:
        value = row[axis]
        if value != values[0]:
            words.append(axis if value is True else f"{axis}{value}" if isinstance(value, int) else f"{axis}_{value}")
    return "-".join(words)


def ranks(row: Row) -> int:
    return row["tp"] * row["pp"] * row["cp"] * row["dp"]


def config_of(row: Row) -> RunConfig:
    config = tiny_run(
        {axis: row[axis] for axis in PARALLEL}
        | dict(pipeline_layers=UNEVEN[row["pp"]] if row["uneven_stages"] else None),
        model=dict(recompute=row["recompute"]),
        algorithm=LOSSES[row["loss"]],
        train=dict(distributed_optimizer=row["distributed_optimizer"], share_prompts=row["share_prompts"]),
    )
    if row["budget"] == "roomy":
        return config
    tight = padded(config.max_model_len, config.micro_batch_align)
    return config.model_copy(update=dict(train=config.train.model_copy(update=dict(max_tokens_per_micro_batch=tight))))
