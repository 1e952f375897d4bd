"""Every element of a model is stored by one rank. With two, Megatron's check of a save fails on rank 0 alone, and the
other ranks wait for it."""

import json
from collections import Counter

import pytest
from ranks import run_ranks
from suites import usual
from tiny_families import MODELS, tiny_config

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import load_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.weights.bridge.megatron_io import structure

LAYOUTS = {"tp2": dict(tp=2), "tp2 with sequence parallelism": dict(tp=2, sequence_parallel=True), "dp2": {}}


def pieces_to_store(folder, names, sizes):
    """Of each model, (key, offset) of the pieces that this rank stores."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    layout = init_layout(ParallelSection(**sizes))
    places = {
        name: [
            (place.key, tuple(place.global_offset))
            for part in structure(load_hf_config(folder / name), layout).parts
            for place in part.places
            if is_main_replica(place.replica_id)
        ]
        for name in names
    }
    layout.close()
    return places


@pytest.mark.full
@pytest.mark.parametrize("layout", usual(LAYOUTS, 1))
def test_every_piece_of_every_family_is_stored_by_one_rank(layout, tmp_path):
    names = [name for name in MODELS if name.partition(" ")[0] == name or name == "llama tied"]
    for name in names:
        (tmp_path / name).mkdir()
        config = tiny_config(*MODELS[name]).to_dict() | dict(architectures=[f"{MODELS[name][0]}ForCausalLM"])
        (tmp_path / name / "config.json").write_text(json.dumps(config, default=str))
    ranks = run_ranks(pieces_to_store, 2, tmp_path, names, LAYOUTS[layout])
    for name in names:
        stored = Counter(piece for rank in ranks for piece in rank[name])
        assert stored and {piece: count for piece, count in stored.items() if count != 1} == {}, name
