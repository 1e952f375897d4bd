"""ERNIE 4.5 with experts: softmax scores, to which a bias is added for the choice of experts only. Layers that predict
several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import Block, BlockRule, Local
from megagrpo.models.families.boxes import whole
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, MLP, experts, shared_experts
from megagrpo.models.families.ernie4_5 import ERNIE_FIXED, ernie_config
from megagrpo.models.families.family import REQUIRED, Family, Raw, Table, expert_problems, mixture


def _bias(name: str) -> BlockRule:
    """The bias of all experts, a matrix [1, E] in the file and a vector [E] here."""

    def blocks(local: Local) -> list[Block]:
        count, shape = local.hf.mixture.count, (1, local.hf.mixture.count)
        return [Block(name, shape, whole(shape), grid=shape, axis=1, at=0, count=count)]

    return BlockRule((name,), blocks)


_TABLE = DENSE | experts("mlp", *GATE_UP_DOWN)
_TABLE |= {"mlp.router.expert_bias": _bias(MLP + "moe_statics.e_score_correction_bias")}
_MOE = ("moe_num_experts", "moe_k", "moe_intermediate_size")


def _table(hf: HfConfig) -> Table:
    return _TABLE | (shared_experts("shared_experts") if hf.mixture.shared_size else {})


def _blocks(raw: Raw) -> frozenset[int]:
    start, every = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_interval", 1)
    end = raw.get("moe_layer_end_index", -1)
    stop = raw["num_hidden_layers"] if end == -1 else min(end + 1, raw["num_hidden_layers"])
    return frozenset(block for block in range(start, stop) if (block + 1) % every == 0)


def _usual(raw: Raw) -> Raw:
    return raw | dict(num_experts=raw.get("moe_num_experts"), num_experts_per_tok=raw.get("moe_k"))


def _read(raw: Raw, common: HfConfig) -> HfConfig:
    width = raw["moe_intermediate_size"]
    shared = width * raw.get("moe_num_shared_experts", 2)
    routed = mixture(_usual(raw), intermediate_size=width, blocks=_blocks(raw), bias=True, shared_size=shared)
    return replace(ernie_config(raw, common), experts=routed)


def _problems(raw: Raw) -> list[str]:
    places: Raw = {key: raw[key] for key in ("moe_layer_start_index", "moe_layer_interval") if key in raw}
    places |= dict(moe_num_shared_experts=raw.get("moe_num_shared_experts", 2))
    wrong = [key for key, value in places.items() if type(value) is not int or value < (key == "moe_layer_interval")]
    if wrong or type(raw.get("moe_layer_end_index", -1)) is not int:
        return [f"{', '.join(wrong or ['moe_layer_end_index'])} in config.json must be a whole number"]
    problems = expert_problems(_usual(raw))
    if not problems and "num_hidden_layers" in raw and not _blocks(raw):
        problems.append("moe_layer_start_index, _end_index and _interval leave no block with experts")
    return problems


FAMILY = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    table=_table,
    read=_read,
    problems=_problems,
    required=(*REQUIRED, *_MOE),
    keys=(
        *_MOE,
        *("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    ),
    # transformers does not read them; the number of layers that predict further tokens
    ignored=("attention_dropout", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    fixed=ERNIE_FIXED | {"moe_norm_min": (1e-12, "only 1e-12 is supported")},
    untrained=lambda hf: (r"model\.mtp_.+", rf"model\.layers\.{hf.num_layers}\..+"),
    names=dict(
        moe_num_experts="num_experts",
        moe_k="num_experts_per_tok",
        moe_num_shared_experts="n_shared_experts",
        moe_layer_start_index="first_k_dense_replace",
    ),
)
