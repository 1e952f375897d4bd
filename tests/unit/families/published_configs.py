"""config.json of published models: those of `PUBLISHED` load, and `MORE` has models that no family lists as its release,
which are multimodal, quantized, of other names or classes.

    python -m tests.unit.families.published_configs

prints every release that is known here, and whether it loads or why not. Keys of towers, which no text model reads, are
left out; so are keys beyond the class of models without a family. In tests/data/published_configs.json a config that is
`like` another one has its keys too, except those in `without`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megagrpo.families.config_keys import architecture_problems
from megagrpo.families.family_index import FAMILIES
from tests.family_examples import EXAMPLES, OTHERS, RELEASES

Raw = dict[str, Any]
FILE = Path(__file__).parents[2] / "data" / "published_configs.json"
# Releases in the families' examples: name -> family.
_EXAMPLES = {f"release of {kind}": kind for kind in FAMILIES if kind in RELEASES}
_EXAMPLES |= {name: kind for kind in FAMILIES for name in EXAMPLES[kind].others}
_KNOWN: dict[str, Raw] = {
    name: dict(model_type=kind, architectures=[FAMILIES[kind].architecture]) | (OTHERS.get(name) or RELEASES[kind])
    for name, kind in _EXAMPLES.items()
}


def _whole(written: Raw) -> Raw:
    """A config of the file, with the keys of the one that it is like."""
    own = {key: _whole(value) if isinstance(value, dict) else value for key, value in written.items()}
    without = {"like", "without", *own.get("without", ())}
    base = _KNOWN[own["like"]] if "like" in own else {}
    return {key: value for key, value in base.items() if key not in without} | {
        key: value for key, value in own.items() if key not in ("like", "without")
    }


def _read(group: str) -> dict[str, Raw]:
    configs = {}
    for name, written in json.loads(FILE.read_text())[group].items():
        configs[name] = _whole(written)
        _KNOWN.setdefault(name, configs[name])
    return configs


_FAMILY_OF = {family.architecture: kind for kind, family in FAMILIES.items()}
# Name of a release -> (family, config.json).
PUBLISHED = {name: (_FAMILY_OF[raw["architectures"][0]], raw) for name, raw in _read("published").items()}
PUBLISHED |= {name: (kind, _KNOWN[name]) for name, kind in _EXAMPLES.items()}
# Name of a release -> config.json.
MORE = _read("more")
# Classes without a family here, so far: model_type -> class, and for multimodal models the model_type of `text_config`.
CLASSES: dict[str, tuple[str, str | None]] = {
    "bailing_moe_v2": ("BailingMoeV2ForCausalLM", None),
    "gemma3n": ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    "jamba": ("JambaForCausalLM", None),
    "phi4_multimodal": ("Phi4MultimodalForCausalLM", None),
}
MORE |= {
    cls.partition("For")[0]: dict(model_type=kind, architectures=[cls])
    | ({} if inside is None else dict(text_config=dict(model_type=inside)))
    for kind, (cls, inside) in CLASSES.items()
}


def published(name: str) -> Raw:
    """config.json of a release."""
    return dict(PUBLISHED[name][1])


def outcomes() -> dict[str, list[str]]:
    """Name of a release -> why it is refused; [] if it loads."""
    return {name: architecture_problems(raw) for name, (_, raw) in PUBLISHED.items()} | {
        name: architecture_problems(raw) for name, raw in MORE.items()
    }


if __name__ == "__main__":
    found = outcomes()
    for name, problems in found.items():
        print(f"{name:34} {'loads' if not problems else 'refused: ' + problems[0]}")
        for problem in problems[1:]:
            print(f"{'':34} and: {problem}")
    counts = Counter("refused" if problems else "load" for problems in found.values())
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), f"of {len(found)}")
