"""Loads the frozen vision tower of a multimodal model from the model's folder. `load_hf` loads a trained one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from megagrpo.policy.images.image_inputs import ImageInputs, ModelInputs, build_tower
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.weights.bridge.load import Checkpoint


def load_tower(policy: MegatronPolicy, folder: Path) -> None:
    """Give the policy the tower of the model in `folder`, on ranks that compute rows of images. Policies of text, and
    those with a trained tower, stay as they are. Raises ValueError when a tensor is missing or of another shape."""
    inputs: ModelInputs = policy.inputs
    if not isinstance(inputs, ImageInputs) or not inputs.reads_pixels or inputs.trains_tower:
        return
    inputs.tower = build_tower(policy.hf_config, policy.dtype)
    with torch.no_grad():
        for weight, tensor in _pairs(inputs.tower, policy, folder, "model.path").values():
            weight.copy_(tensor)


def check_tower(policy: MegatronPolicy, reference: Path) -> None:
    """Raise ValueError if the model in `reference` has another tower than the policy, which computes its images too. A
    trained tower is one of the weights of which the reference has its own."""
    inputs: ModelInputs = policy.inputs
    if not isinstance(inputs, ImageInputs) or inputs.tower is None or inputs.trains_tower:
        return
    for name, (weight, tensor) in _pairs(inputs.tower, policy, reference, "model.reference_path").items():
        if not torch.equal(weight, tensor.to(weight)):
            raise ValueError(
                f"model.reference_path: {name} in {reference} differs from the policy's, whose tower computes the "
                "images of both; name a model with the policy's tower, or leave it empty"
            )


def _pairs(tower: nn.Module, policy: MegatronPolicy, folder: Path, key: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the name in the files of `folder`, the weight and the stored tensor of each weight of the tower."""
    vision, checkpoint = policy.hf_config.vision, Checkpoint(folder)
    assert vision is not None, "images need a tower"
    stored, pairs = {vision.own_name(name): name for name in checkpoint.where}, {}
    for own, weight in tower.state_dict().items():
        if (name := stored.get(own)) is None:
            said = f"{folder} lacks {vision.file_name(own)}, a tensor of the tower"
            raise ValueError(f"{key}: {said}; download it again")
        tensor = checkpoint.tensor(name)
        if tensor.shape != weight.shape:
            said = f"{name} in {folder} has the shape {list(tensor.shape)}"
            raise ValueError(f"{key}: {said}, and config.json says {list(weight.shape)}; download it again")
        pairs[name] = weight, tensor
    return pairs
