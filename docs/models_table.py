"""Writes the tables of docs/models.md: python docs/models_table.py

Families and wrappers come from megagrpo/families, their models from tests/data/families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megagrpo.families.family_index import FAMILIES

PAGE = Path(__file__).with_name("models.md")
EXAMPLES = Path(__file__).parents[1] / "tests" / "data" / "families"  # fields: `Example` in tests/family_examples.py
BEGIN, END = "<!-- the table of {} begins -->", "<!-- the table of {} ends -->"


def example_of(name: str) -> dict[str, Any]:
    """The example of a family, without the fields that have their defaults."""
    return json.loads((EXAMPLES / f"{name}.json").read_text())


def families() -> list[str]:
    """The rows of the supported families."""
    lines = ["| model_type | class | models |", "|---|---|---|"]
    for name, family in FAMILIES.items():
        lines.append(f"| `{name}` | `{family.architecture}` | {example_of(name)['models']} |")
    return lines


def wrappers() -> list[str]:
    """The rows of multimodal models."""
    lines = ["| model_type | class | text model | images |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        for wrapper in family.wrappers:
            images = "[yes](vision.md)" if wrapper.vision else "no"
            lines.append(f"| `{wrapper.model_type}` | `{wrapper.architecture}` | `{name}` | {images} |")
    return lines


def with_tables(page: str) -> str:
    """The page with the texts between its marks replaced by the tables."""
    for name, lines in (("families", families()), ("wrappers", wrappers())):
        before, _, rest = page.partition(BEGIN.format(name))
        _, _, after = rest.partition(END.format(name))
        page = "\n".join([f"{before}{BEGIN.format(name)}\n", *lines, f"\n{END.format(name)}{after}"])
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
