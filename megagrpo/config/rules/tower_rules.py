"""What does not work with a trained vision tower (`model.freeze_vision_tower: false`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megagrpo.config.basics.problems import Problem

if TYPE_CHECKING:
    from megagrpo.config import RunConfig


def tower_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not work with a trained vision tower."""
    key = "model.freeze_vision_tower"
    if config.model.freeze_vision_tower:
        return
    refused: dict[str, tuple[bool, str]] = {
        "data.images": (not config.data.images, "a run of text has no tower; set data.images to true"),
        "lora": (config.lora.enabled, "adapters are in the language model only; freeze the tower"),
        "train.optimizer": (
            config.train.optimizer == "muon",
            "Muon would orthogonalize fused queries, keys and values, and position embeddings; choose adam",
        ),
        "train.overlap": (
            "param_gather" in config.train.overlap,
            "ranks without images would gather its weights in another order; leave param_gather out",
        ),
        "rollout.quantization": (
            config.rollout.quantization != "none",
            "vLLM would quantize the tower's linears, which has not been tested; set it to none",
        ),
    }
    for other, (wrong, reason) in refused.items():
        if wrong:
            yield Problem((key, other), f"false: {reason}")
