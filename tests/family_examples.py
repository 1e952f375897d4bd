"""Examples of the families in tests/data/families/MODEL_TYPE.json, for proofs and for docs/models.md. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "families"
Raw = dict[str, Any]  # keys of config.json

# Sizes of the tiny models: no size is a multiple of all others, and no number of ranks divides the vocabulary.
TINY_SIZES: Raw = dict(
    hidden_size=96, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80
) | dict(vocab_size=127, initializer_range=0.1, rms_norm_eps=1e-6, max_position_embeddings=256)
# A vision tower of SigLIP, which several models have.
TINY_SIGLIP: Raw = dict(
    model_type="siglip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=2
) | dict(num_attention_heads=4, image_size=32, patch_size=8)
TINY_EXPERTS: Raw = dict(head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)


@dataclass(frozen=True)
class Example:
    """Facts about one family.

    - `models` are published models, for people; `differs` is what differs from a Llama.
    - `cases` are tiny models, by name: keys of config.json beside `TINY_SIZES`. The first one is the plainest. Each
      further one has an option that changes the computation.
    - `wrapped` are tiny multimodal models around the first case: model_type of a wrapper -> the keys of config.json
      beside `text_config`, which itself may have keys that replace those of the case.
    - `release` is config.json of a published model, with the sizes of that model.
    - `others` are further published models, by name, whose parts `release` lacks: keys that differ from `release`.
    - `served` are keys that the tiny models need in vLLM on a CPU, which has kernels for some sizes only.
    - `served_dtype` is what vLLM computes in on a CPU: "bfloat16" where its kernels have no float32.
    - `unserved` maps a case to the regular expression of vLLM's error.
    - `tolerance` is the largest difference of logits from transformers', in float32, in any layout.
    - `drift` is the largest difference of log-probs of vLLM for equal weights: 0 where vLLM repeats the last bits.
    - `why` has the reason of a field's value: the name of the field -> the reason.
    """

    models: str
    differs: str
    cases: dict[str, Raw]
    wrapped: dict[str, Raw] = field(default_factory=dict)
    release: Raw = field(default_factory=dict)
    others: dict[str, Raw] = field(default_factory=dict)
    served: Raw = field(default_factory=dict)
    served_dtype: str = "float32"
    unserved: dict[str, str] = field(default_factory=dict)
    drift: float = 0.0
    tolerance: float = 1e-5
    why: dict[str, str] = field(default_factory=dict)


EXAMPLES = {file.stem: Example(**json.loads(file.read_text())) for file in sorted(FOLDER.glob("*.json"))}
RELEASES = {kind: example.release for kind, example in EXAMPLES.items() if example.release}
# Further releases of families: name -> config.json.
OTHERS = {name: example.release | keys for example in EXAMPLES.values() for name, keys in example.others.items()}
