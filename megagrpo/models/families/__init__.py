"""The families of models that can be trained, in one short file each or with their relatives. A new family needs only
a file with a `Family` in this folder."""

from __future__ import annotations

import importlib
import pkgutil

from megagrpo.models.families.family import Family

MODULES_ABOVE = ("config_keys", "hf_config", "weight_sources")  # modules of this folder that import FAMILIES


def _find() -> dict[str, Family]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if module.name not in MODULES_ABOVE]
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    families = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {family.model_type: family for family in families}


FAMILIES = _find()  # by the model_type of config.json
# model_type of releases whose class is a family's own -> that family
ALIASES = {alias: family for family in FAMILIES.values() for alias in family.aliases}


def family_of(kind: str | None) -> Family | None:
    """Return the family of a model_type in config.json, or None."""
    return FAMILIES.get(kind or "") or ALIASES.get(kind or "")
