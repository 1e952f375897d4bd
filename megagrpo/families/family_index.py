"""All families, by the model_type of config.json. A new family needs only a row in a table of this folder, or a file in
`own/` with a `Family`."""

from __future__ import annotations

import importlib
import pkgutil

from megagrpo.families import dense, mixture, own, recurrent
from megagrpo.families.shared.family import Family


def _find() -> dict[str, Family]:
    files = pkgutil.walk_packages(own.__path__, f"{own.__name__}.")
    modules = [dense, mixture, recurrent, *(importlib.import_module(file.name) for file in files)]
    families = {
        value.model_type: value for module in modules for value in vars(module).values() if isinstance(value, Family)
    }
    return dict(sorted(families.items()))


FAMILIES = _find()
# model_type of releases whose class is a family's own -> that family
ALIASES = {alias: family for family in FAMILIES.values() for alias in family.aliases}


def family_of(kind: str | None) -> Family | None:
    """Return the family of a model_type in config.json, or None."""
    return FAMILIES.get(kind or "") or ALIASES.get(kind or "")
