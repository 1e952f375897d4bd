"""The families of models that can be trained, one file each; a file with a `FAMILY` in this folder is all that a new one takes."""

from __future__ import annotations

import importlib
import pkgutil

from megagrpo.families.family import Family


def _find() -> dict[str, Family]:
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in families}


FAMILIES = _find()  # by the model_type of config.json
