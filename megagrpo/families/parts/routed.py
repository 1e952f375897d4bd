"""Mixtures whose router DeepSeek introduced: shared experts, groups of experts, a first run of dense blocks, and with
`sigmoid` scores a bias for the choice of experts. Imports no torch."""

from __future__ import annotations

from megagrpo.families.parts.llama_table import EXPERT_BIAS, USUAL_EXPERTS, shared_experts
from megagrpo.families.shared.architecture import Experts, HfConfig
from megagrpo.families.shared.family import Raw, Table, expert_problems

_NEEDED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
ROUTED_KEYS = (*_NEEDED, "first_k_dense_replace", "routed_scaling_factor", "n_group", "topk_group")
ROUTED: Table = USUAL_EXPERTS | shared_experts("shared_experts")
ROUTED_BY_BIAS: Table = ROUTED | EXPERT_BIAS
DENSE_MLP, SPARSE_MLP = "dense", "sparse"  # in config.json's mlp_layer_types
NORMALIZED = {"norm_topk_prob": (True, "only weights of a token's experts that add up to 1 are supported")}


def routed_experts(raw: Raw, *, normalized: bool, sigmoid: bool = False, bias: bool = False) -> Experts:
    """Return the mixture. The families differ in `normalized`, `sigmoid` and `bias` of `Experts`."""
    num_groups, groups_per_token = groups(raw)
    return Experts(
        count=raw["n_routed_experts"],
        per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        blocks=frozenset(range(raw.get("first_k_dense_replace") or 0, raw["num_hidden_layers"])),
        scale=1.0 if (scale := raw.get("routed_scaling_factor")) is None else scale,
        shared_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        normalized=normalized,
        sigmoid=sigmoid,
        bias=bias,
        groups=num_groups,
        groups_per_token=groups_per_token,
    )


def groups(raw: Raw) -> tuple[int, int]:
    """Return `groups` and `groups_per_token` of Experts."""
    return raw.get("n_group") or 1, raw.get("topk_group") or 1


def missing_keys(raw: Raw) -> list[str]:
    """Return the keys of the mixture that config.json lacks."""
    return [f"config.json lacks {key}" for key in _NEEDED if not raw.get(key)]


def routed_problems(raw: Raw) -> list[str]:
    """Return why the mixture cannot be trained."""
    if (lines := missing_keys(raw)) or "num_hidden_layers" not in raw:
        return lines
    lines = expert_problems(raw | dict(num_experts=raw["n_routed_experts"]))
    if (raw.get("first_k_dense_replace") or 0) >= raw["num_hidden_layers"]:
        lines.append("first_k_dense_replace leaves no block with experts; set it to less than num_hidden_layers")
    count, of_token = groups(raw)
    if raw["n_routed_experts"] % count or of_token * raw["n_routed_experts"] // count < raw["num_experts_per_tok"]:
        lines.append(
            f"topk_group={of_token} of n_group={count} groups of the {raw['n_routed_experts']} experts do not "
            f"hold the {raw['num_experts_per_tok']} of num_experts_per_tok"
        )
    return lines


def mlp_kind_problems(raw: Raw, default: int) -> list[str]:
    """Return how `mlp_layer_types`, which transformers reads, disagrees with `first_k_dense_replace`, which vLLM reads.
    Without the list, transformers has `default` dense blocks."""
    kinds, dense, blocks = raw.get("mlp_layer_types"), raw.get("first_k_dense_replace"), raw.get("num_hidden_layers")
    if dense is None or blocks is None:  # another line says what is missing
        return []
    expected = [DENSE_MLP] * dense + [SPARSE_MLP] * (blocks - dense)
    if (kinds is None and dense == default) or kinds == expected:
        return []
    if kinds is None:
        said = f"first_k_dense_replace={dense} without mlp_layer_types, for which transformers has {default} dense"
        return [f"{said}; add mlp_layer_types with {dense} x {DENSE_MLP!r} and {blocks - dense} x {SPARSE_MLP!r}"]
    said = f"mlp_layer_types does not have {DENSE_MLP!r} for the first {dense} blocks and {SPARSE_MLP!r} for the others"
    return [f"{said}, as first_k_dense_replace={dense} means in vLLM; set one to match the weights"]


def beyond(hf: HfConfig) -> tuple[str, ...]:
    """Return patterns of the tensors of layers after the last block, which predict further tokens."""
    extra = hf.raw.get("num_nextn_predict_layers") or hf.raw.get("num_mtp_layers") or 1
    return tuple(rf"model\.layers\.{hf.num_layers + i}\..+" for i in range(extra))
