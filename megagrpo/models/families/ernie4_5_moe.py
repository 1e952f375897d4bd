"""ERNIE 4.5 with experts: softmax scores, to which a bias is added for the choice of experts only. Layers that predict
several tokens are not trained."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.models.families.architecture import HfConfig
from megagrpo.models.families.blocks import Block, BlockRule, Local
from megagrpo.models.families.boxes import whole
from megagrpo.models.families.dense import DENSE, GATE_UP_DOWN, MLP, experts, shared_experts
from megagrpo.models.families.ernie4_5 import ERNIE_FIXED, ernie_config
from megagrpo.models.families.example import Example
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
    example=Example(
        models="ERNIE-4.5-21B-A3B, 300B-A47B",
        differs="as `ernie4_5`, experts, some of them shared, also chosen by a bias",
        cases={
            "ernie4_5_moe": dict(moe_num_experts=8, moe_k=3, moe_intermediate_size=32, moe_num_shared_experts=2)
            | dict(tie_word_embeddings=False),
            "ernie4_5_moe without shared experts, some blocks dense, tied": dict(moe_num_experts=4, moe_k=2)
            | dict(moe_intermediate_size=32, moe_num_shared_experts=0, moe_layer_start_index=0, moe_layer_interval=2),
        },
        release=dict(
            model_type="ernie4_5_moe",
            architectures=["Ernie4_5_MoeForCausalLM"],
            bos_token_id=1,
            eos_token_id=2,
            hidden_act="silu",
            hidden_size=2560,
            intermediate_size=12288,
            max_position_embeddings=131072,
            moe_capacity=[64, 64, 64],
            moe_gate="topk",
            moe_intermediate_size=1536,
            moe_k=6,
            moe_layer_interval=1,
            moe_layer_start_index=1,
            moe_num_experts=64,
            moe_num_shared_experts=2,
            moe_use_aux_free=True,
            num_attention_heads=20,
            num_hidden_layers=28,
            num_key_value_heads=4,
            num_nextn_predict_layers=1,
            pad_token_id=0,
            rms_norm_eps=1e-05,
            rope_theta=500000.0,
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
            use_bias=False,
            use_cache=False,
            vocab_size=103424,
        ),
    ),
)
