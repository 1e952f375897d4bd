"""The images of dumped samples, as transformers' model takes them: its own image processor reads the dumped files."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megagrpo.config import ConfigError
from megagrpo.proof.audit.saved import Sample
from megagrpo.row_image import RowImage


def image_inputs(folder: Path, model: Any, sample: Sample) -> dict[str, Tensor]:
    """Return the arguments of a forward pass that hold the sample's images, from the image processor in `folder`; {}
    without images. Raises ConfigError if the response holds an image token, which transformers takes for an image."""
    if not sample.images:
        return {}
    is_image = sample.token_ids == model.config.image_token_id
    if is_image[sample.prompt_length :].any():
        raise ConfigError("--step: a response holds an image token, which transformers takes for an image")
    pictures = [RowImage(str(file)).rgb() for file in sample.images]
    made = _processor(folder)(images=pictures, return_tensors="pt")
    made["token_type_ids"] = made["mm_token_type_ids"] = is_image[None].int()  # models take one of them
    taken = inspect.signature(model.forward).parameters
    inputs = {name: tensor for name, tensor in made.items() if name in taken}
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


@functools.cache
def _processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)


def freeze_tower(model: Any) -> None:
    """Freeze all parameters but those of the language model."""
    language: list[nn.Module] = [model.get_decoder(), model.get_output_embeddings()]
    trained = {id(parameter) for module in language for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)
