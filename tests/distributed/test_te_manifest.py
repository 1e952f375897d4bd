"""Transformer Engine's parameters, recorded from a build of every family (te_manifest.py): the bridge maps each of them
to the same tensors as our parameters."""

import json

import pytest
from ranks import run_ranks
from te_manifest import (
    CASES,
    FILE,
    architecture,
    checkpoint_keys,
    chunk_of,
    recorded_chunk,
    variants,
)

from megagrpo.config import ParallelSection
from megagrpo.families.family_index import FAMILIES
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.transformer.specs import LAYERS_PER_BLOCK
from megagrpo.weights.blocks.parameter_blocks import blocks, tensor_names

MANIFEST = json.loads(FILE.read_text())


def parts(chunk, hf_config, layout) -> dict[tuple, str]:
    """All pieces of tensors in the chunk's weights, each counted once -> its dtype."""
    found = [
        ((block.name, block.shape, block.box), param.dtype)
        for _, param, held in blocks([chunk], hf_config, layout)
        for block in held
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def differences() -> list[str]:
    """Differences between the bridge's blocks for the recorded parameters and for ours, and between the names in
    checkpoints."""
    alone, odd = init_layout(ParallelSection()), []
    for name in CASES:
        hf_config = architecture(name)
        for variant, recorded in zip(variants(hf_config, alone), MANIFEST["models"][name], strict=True):
            chunk, layout = chunk_of(hf_config, *variant), variant[0]
            ours = parts(chunk, hf_config, layout)
            theirs = parts(recorded_chunk(recorded, LAYERS_PER_BLOCK * hf_config.num_layers), hf_config, layout)
            odd += [f"{name}, {layout.parallel.tp}: {what}" for what in sorted(ours.items() ^ theirs.items(), key=str)]
        missing = tensor_names(hf_config) - {tensor for tensor, _, _ in ours} - {"lm_head.weight"}
        odd += [f"{name}: no parameter has {tensor}" for tensor in missing]
        odd += [
            f"{name}: {key} in one checkpoint"
            for key in {*checkpoint_keys(chunk, alone)} ^ {*MANIFEST["checkpoint_keys"][name]}
        ]
    alone.close()
    return odd


@pytest.mark.full
def test_every_parameter_of_transformer_engine_is_a_part_of_a_tensor_and_the_same_one_as_without_it():
    assert {architecture(name).family for name in MANIFEST["models"]} == set(FAMILIES) and list(
        MANIFEST["models"]
    ) == list(CASES)
    assert run_ranks(differences, 1)[0] == []


def test_the_recipes_of_transformer_engine_scale_what_ours_scale():
    told = MANIFEST["recipes"]
    assert all(
        "format=E4M3" in said if name.endswith("e4m3") else "format=HYBRID" in said for name, said in told.items()
    )
    for form in ("e4m3", "hybrid"):
        tensorwise, blockwise, mxfp8 = (told[f"{recipe} {form}"] for recipe in ("tensorwise", "blockwise", "mxfp8"))
        assert tensorwise.startswith("recipe_type=Float8CurrentScaling") and "power_2_scale=True" not in tensorwise
        assert blockwise.startswith("recipe_type=Float8BlockScaling") and "power_2_scale=False" not in blockwise
        assert all(f"{what}_block_scaling_dim={dims}" in blockwise for what, dims in (("x", 1), ("w", 2), ("grad", 1)))
        assert mxfp8.startswith("recipe_type=MXFP8BlockScaling") and "enable_2d_quantization=False" in mxfp8
        assert not any(f"amax_epsilon={size}" in told for told in (tensorwise, blockwise) for size in (1, "1e"))
