"""transformers' Kimi K2.5, saved under the names of the published files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

_TEXT = "model.language_model."


def _published(name: str) -> str:
    """The published name of a tensor as transformers 5.19 saves it: with `blocks` in place of the decoder's layers."""
    if name.startswith(_TEXT):
        return "language_model.model." + name.removeprefix(_TEXT).replace("blocks.", "layers.", 1)
    return name.removeprefix("model.")


@functools.cache
def published_class() -> type[transformers.PreTrainedModel]:
    """The class, whose name is the one in the published config.json."""

    def save(self: Any, folder: str | Path, **options: Any) -> None:
        transformers.PreTrainedModel.save_pretrained(self, folder, **options)
        if not options.get("save_original_format", True):
            return
        for file in Path(folder).glob("*.safetensors"):
            save_file({_published(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
        for file in Path(folder).glob("*.index.json"):
            index = json.loads(file.read_text())
            index["weight_map"] = {_published(name): where for name, where in index["weight_map"].items()}
            file.write_text(json.dumps(index, indent=2))

    base = transformers.Kimi_K25ForConditionalGeneration
    return type("KimiK25ForConditionalGeneration", (base,), dict(save_pretrained=save))
