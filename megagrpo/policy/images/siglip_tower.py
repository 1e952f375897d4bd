"""The tower of images of one size: SigLIP, then the projector that pools patches into tokens (Gemma 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class SquareTower(nn.Module):
    """transformers' modules of a whole model's configuration, with their names there. `projector` is the class of the
    second one."""

    def __init__(self, config: Any, projector: Callable[[Any], nn.Module]):
        from transformers import AutoModel

        super().__init__()
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = projector(config)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """Return an object with the rows [n, H] of images [k, 3, height, width], `pooler_output`, as towers of
        transformers do. All images have one grid."""
        made = self.vision_tower(pixel_values=pixels)
        made.pooler_output = self.multi_modal_projector(made.last_hidden_state).flatten(0, 1)
        return made
