"""Writes the tables of docs/models.md and docs/model_tests.md: python docs/models_table.py

Families and wrappers come from megagrpo/families, models and cases from tests/data/families, and proofs from
docs/families.json, which `python -m tests.prove_family NAME --write` fills.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megagrpo.families.family_index import FAMILIES

PAGES = tuple(Path(__file__).with_name(name) for name in ("models.md", "model_tests.md"))
RESULTS = Path(__file__).with_name("families.json")
EXAMPLES = Path(__file__).parents[1] / "tests" / "data" / "families"  # fields: `Example` in tests/family_examples.py
BEGIN, END = "<!-- the table of {} begins -->", "<!-- the table of {} ends -->"


def example_of(name: str) -> dict[str, Any]:
    """The example of a family, without the fields that have their defaults."""
    return json.loads((EXAMPLES / f"{name}.json").read_text())


def families() -> list[str]:
    """The rows of the supported families."""
    lines = ["| model_type | class | models | differences from a Llama |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        example = example_of(name)
        lines.append(f"| `{name}` | `{family.architecture}` | {example['models']} | {example['differs']} |")
    return lines


def wrappers() -> list[str]:
    """The rows of multimodal models."""
    lines = ["| model_type | class | text model | images |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        for wrapper in family.wrappers:
            images = "[yes](vision.md)" if wrapper.vision else "no"
            lines.append(f"| `{wrapper.model_type}` | `{wrapper.architecture}` | `{name}` | {images} |")
    return lines


def proofs() -> list[str]:
    """The rows of what `prove_family` measured."""
    results = json.loads(RESULTS.read_text())
    lines = ["| family | logits differ by | FP8 | vLLM: log-probs differ by |", "|---|---|---|---|"]
    for name in FAMILIES:
        found = results.get(name, {})
        cells = [_number(found.get("logits")), _fp8(found), _vllm(name, found)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _vllm(name: str, found: dict[str, Any]) -> str:
    example = example_of(name)
    if reason := FAMILIES[name].unserved:
        return reason
    measured = max(found.get("vllm", {}).values(), default=None)
    # `reach_vllm` compares with the trainer's rounding
    rounded = example.get("served_dtype") == "bfloat16" and measured == 0
    cell = "as bf16 rounds" if rounded else _number(measured)
    unserved = example.get("unserved", {})
    return cell + (f", without: {'; '.join(unserved)}" if unserved else "")


def _fp8(found: dict[str, Any]) -> str:
    rounding = found.get("fp8")
    return rounding if rounding == "refused" else _number(rounding)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}".replace("e-0", "e-")


def with_tables(page: str) -> str:
    """The page with the texts between its marks replaced by the tables."""
    for name, lines in (("families", families()), ("wrappers", wrappers()), ("proofs", proofs())):
        before, mark, rest = page.partition(BEGIN.format(name))
        if not mark:
            continue
        _, _, after = rest.partition(END.format(name))
        page = "\n".join([f"{before}{BEGIN.format(name)}\n", *lines, f"\n{END.format(name)}{after}"])
    return page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
