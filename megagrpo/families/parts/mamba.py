"""Shared code of families with Mamba-2: the rows of the table, and what all of them need of config.json. Imports no
torch."""

from __future__ import annotations

from megagrpo.families.parts.llama_table import LAYER
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import part_rows, same
from megagrpo.families.shared.family import Raw, Table
from megagrpo.families.shared.recurrence import Mamba2

FLOAT32_STATES: dict[str, Raw | str] = {"--mamba-ssm-cache-dtype": "float32"}  # as the trainer's; vLLM rounds them
_LIMIT = "time_step_limit"


def mamba_rows(hf: HfConfig, folder: str, norm: str) -> Table:
    """The parameters of Mamba-2 under `folder` of a block, and the norm of its inputs; empty for a model without it."""
    if not isinstance(hf.recurrence, Mamba2):
        return {}
    mamba, biases = LAYER + folder, ["bias"] * hf.recurrence.conv_bias
    return {
        "norm.weight": same(LAYER + norm),
        "mixer.in_proj.layer_norm_weight": same(LAYER + norm),
        "mixer.in_proj.weight": part_rows(dict.fromkeys(("z", "x", "B", "C", "dt"), mamba + "in_proj.weight")),
        **{
            f"mixer.conv1d_{name}": part_rows(dict.fromkeys("xBC", f"{mamba}conv1d.{name}"))
            for name in ("weight", *biases)
        },
        **{
            f"mixer.{name}": same(mamba + name)
            for name in ("A_log", "D", "dt_bias", *["norm.weight"] * hf.recurrence.normed)
        },
        "mixer.out_proj.weight": same(mamba + "out_proj.weight"),
    }


def mamba2(raw: Raw, sizes: tuple[str, ...], blocks: frozenset[int], conv_bias: bool) -> Mamba2:
    """Return the recurrent part in `blocks`; `sizes` as in `mamba_problems`."""
    heads, width, groups, state, kernel = (raw[key] for key in sizes)
    return Mamba2(heads, width, groups, state, kernel, blocks, conv_bias)


def mamba_problems(raw: Raw, sizes: tuple[str, ...]) -> list[str]:
    """Return invalid `sizes`: the keys of heads, their width, groups, state width and convolved tokens, in this order.
    Also limits of the steps, which vLLM does not read."""
    problems = [
        f"{key} is {raw.get(key)!r} in config.json; it must be a positive whole number"
        for key in sizes
        if type(raw.get(key)) is not int or raw[key] < 1
    ]
    if not problems and raw[sizes[0]] % raw[sizes[2]]:
        problems.append(f"{sizes[0]}={raw[sizes[0]]} is not divisible by {sizes[2]}={raw[sizes[2]]}")
    if (limit := raw.get(_LIMIT)) is not None and [*map(float, limit)] != [0, float("inf")]:
        problems.append(f"{_LIMIT}={limit} is not supported: vLLM does not read it; only [0, Infinity] is")
    return problems
