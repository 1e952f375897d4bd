"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from megagrpo.families.parts.llama_table import DENSE, MLP, USUAL_EXPERTS, shared_experts
from megagrpo.families.shared.architecture import HfConfig
from megagrpo.families.shared.blocks import Block, BlockRule, Local
from megagrpo.families.shared.boxes import whole
from megagrpo.families.shared.family import REQUIRED, Family, Raw, expert_problems, mixture, rope


# ERNIE 4.5, dense: a Llama that rotates neighbouring dimensions of each head.
def _read(raw: Raw, common: HfConfig) -> HfConfig:
    """Return what the ERNIE families share. config.json may leave out default values."""
    return replace(
        common,
        rotary_interleaved=True,
        tied_embeddings=raw.get("tie_word_embeddings", True),
        rope_theta=rope({"rope_theta": 500000.0} | raw)["rope_theta"],
        norm_eps=raw.get("rms_norm_eps", 1e-5),
    )


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    table=lambda hf: DENSE,
    read=_read,
    required=(*REQUIRED, "head_dim"),  # transformers has a default for it in this family
    fixed={
        "use_bias": (False, "biases in the linears are not supported"),
        "rope_interleaved": (True, "this family rotates neighbouring dimensions"),
    },
    ignored=("attention_dropout",),  # transformers ignores it too
)


# ERNIE 4.5 with experts: softmax scores, to which a bias is added for the choice of experts only. Layers that predict
# several tokens are not trained.
def _bias(name: str) -> BlockRule:
    """The bias of all experts, a matrix [1, E] in the file and a vector [E] here."""

    def blocks(local: Local) -> list[Block]:
        count, shape = local.hf.mixture.count, (1, local.hf.mixture.count)
        return [Block(name, shape, whole(shape), grid=shape, axis=1, at=0, count=count)]

    return BlockRule((name,), blocks)


_MOE_TABLE = DENSE | USUAL_EXPERTS
_MOE_TABLE |= {"mlp.router.expert_bias": _bias(MLP + "moe_statics.e_score_correction_bias")}
_MOE_SIZES = ("moe_num_experts", "moe_k", "moe_intermediate_size")


def _moe_blocks(raw: Raw) -> frozenset[int]:
    start, every = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_interval", 1)
    end = raw.get("moe_layer_end_index", -1)
    stop = raw["num_hidden_layers"] if end == -1 else min(end + 1, raw["num_hidden_layers"])
    return frozenset(block for block in range(start, stop) if (block + 1) % every == 0)


def _moe_usual(raw: Raw) -> Raw:
    return raw | dict(num_experts=raw.get("moe_num_experts"), num_experts_per_tok=raw.get("moe_k"))


def _moe_read(raw: Raw, common: HfConfig) -> HfConfig:
    width = raw["moe_intermediate_size"]
    shared = width * raw.get("moe_num_shared_experts", 2)
    routed = mixture(_moe_usual(raw), intermediate_size=width, blocks=_moe_blocks(raw), bias=True, shared_size=shared)
    return replace(_read(raw, common), experts=routed)


def _moe_problems(raw: Raw) -> list[str]:
    places: Raw = {key: raw[key] for key in ("moe_layer_start_index", "moe_layer_interval") if key in raw}
    places |= dict(moe_num_shared_experts=raw.get("moe_num_shared_experts", 2))
    wrong = [key for key, value in places.items() if type(value) is not int or value < (key == "moe_layer_interval")]
    if wrong or type(raw.get("moe_layer_end_index", -1)) is not int:
        return [f"{', '.join(wrong or ['moe_layer_end_index'])} in config.json must be a whole number"]
    problems = expert_problems(_moe_usual(raw))
    if not problems and "num_hidden_layers" in raw and not _moe_blocks(raw):
        problems.append("moe_layer_start_index, _end_index and _interval leave no block with experts")
    return problems


ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    table=lambda hf: _MOE_TABLE | (shared_experts("shared_experts") if hf.mixture.shared_size else {}),
    read=_moe_read,
    problems=_moe_problems,
    required=(*REQUIRED, *_MOE_SIZES),
    keys=(
        *_MOE_SIZES,
        *("moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    ),
    # transformers does not read them; the number of layers that predict further tokens
    ignored=("attention_dropout", "moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    fixed=ERNIE4_5.fixed | {"moe_norm_min": (1e-12, "only 1e-12 is supported")},
    untrained=lambda hf: (r"model\.mtp_.+", rf"model\.layers\.{hf.num_layers}\..+"),
    names=dict(
        moe_num_experts="num_experts",
        moe_k="num_experts_per_tok",
        moe_num_shared_experts="n_shared_experts",
        moe_layer_start_index="first_k_dense_replace",
    ),
)
