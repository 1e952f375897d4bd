"""Loads the vision tower of a multimodal model from the model's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from megagrpo.models.bridge.load import Checkpoint
from megagrpo.policy.image_inputs import ImageInputs, ModelInputs, build_tower
from megagrpo.policy.megatron_policy import MegatronPolicy


def load_tower(policy: MegatronPolicy, folder: Path) -> None:
    """Give the policy the tower of the model in `folder`, on ranks that compute rows of images. Policies of text stay
    as they are. Raises ValueError when a tensor is missing or of another shape."""
    inputs: ModelInputs = policy.inputs
    if not isinstance(inputs, ImageInputs) or not inputs.reads_pixels:
        return
    vision = policy.hf_config.vision
    assert vision is not None, "images need a tower"
    tower, checkpoint = build_tower(folder, policy.hf_config, policy.dtype), Checkpoint(folder)
    stored = {name.removeprefix("model."): name for name in checkpoint.where}
    weights = tower.state_dict()
    if missing := [name for name in weights if vision.prefix + name not in stored]:
        said = f"{folder} lacks {vision.prefix}{missing[0]}, a tensor of the tower"
        raise ValueError(f"model.path: {said}; download it again")
    with torch.no_grad():
        for name, weight in weights.items():
            tensor = checkpoint.tensor(stored[vision.prefix + name])
            if tensor.shape != weight.shape:
                said = f"{stored[vision.prefix + name]} in {folder} has the shape {list(tensor.shape)}"
                raise ValueError(f"model.path: {said}, and config.json says {list(weight.shape)}; download it again")
            weight.copy_(tensor)
    inputs.tower = tower
