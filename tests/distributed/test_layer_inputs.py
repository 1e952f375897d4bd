"""Inputs per layer: what the optimizer makes of their weights."""

import torch
from ranks import run_ranks
from tiny_families import MODELS, class_of, tiny_config

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.transformer.transformer_config import ModelOptions


def embeddings(raw: dict) -> list[str]:
    layout = init_layout(ParallelSection())
    (chunk,) = build_model(parse_hf_config(raw), layout, ModelOptions(dtype=torch.float32, init_weights=False))
    layout.close()
    return [name for name, p in chunk.named_parameters() if getattr(p, "is_embedding_or_output_parameter", False)]


def test_muon_leaves_the_second_embedding_to_adam_as_it_does_the_first():
    kind, extra = MODELS["gemma4 small"]
    class_of(kind)
    (found,) = run_ranks(embeddings, 1, tiny_config(kind, extra).to_dict())
    assert found == ["embedding.word_embeddings.weight", "embedding.layer_inputs.words.weight"]
