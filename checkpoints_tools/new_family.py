"""Drafts the file of a family that megagrpo does not support yet, from a config.json.

    python checkpoints_tools/new_family.py FOLDER_OR_CONFIG
    python checkpoints_tools/new_family.py config.json --out my_family.py

Builds transformers' own model of that type without weights, and takes the parts of a family whose tensors the model
has. Writes the draft to megagrpo/families/own/ of this clone, and the example for the tests, a JSON file, to
tests/data/families/; with --out the JSON file is beside the draft. Lists what is left to do: unknown keys and tensors,
and transformers' code to compare. Of a multimodal model it drafts the text model, and lists the line of code for the
model around it. docs/add_a_model.md describes the rest. Exit code 0: the draft is written, 2: the config cannot be
read, or a file exists.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # holds megagrpo if it is not installed

from megagrpo.commands.api.inputs.exit_codes import one_command
from megagrpo.commands.parser import Parser
from megagrpo.config import ConfigError, Problem, ProblemError
from megagrpo.families.config_keys import HARMLESS
from megagrpo.families.family_index import family_of
from megagrpo.families.hf_config import read_raw_config
from megagrpo.families.parts import llama_table
from megagrpo.families.parts.llama_table import DENSE, GATE_UP_DOWN, POST_NORMED, experts, shared_experts
from megagrpo.families.shared.family import COMMON, FIXED, Table
from megagrpo.platform.process.terminal import show

FAMILIES, EXAMPLES = ROOT / "megagrpo" / "families" / "own", ROOT / "tests" / "data" / "families"
_BLOCKS = 4  # decoder blocks of the model that is built: enough for the first dense blocks of mixtures
_COLUMNS = 90
# of dense blocks, under another name
_OTHER_MLP = re.compile(r"model\.layers\.\{L\}\.\w+\.(gate_proj|w1)\.weight")
_HEAD = "lm_head.weight"  # absent in tied models
# Expression of the draft -> the part of a table. The first part of a group whose tensors all exist is taken.
_PARTS: list[list[tuple[str, Table]]] = [
    [("GATE_UP", llama_table.GATE_UP)],
    [("QKV_BIAS", llama_table.QKV_BIAS)],
    [("QK_NORM", llama_table.QK_NORM)],
    [
        ('experts("mlp", *GATE_UP_DOWN)', experts("mlp", *GATE_UP_DOWN)),
        ('experts("block_sparse_moe", "w1", "w3", "w2")', experts("block_sparse_moe", "w1", "w3", "w2")),
    ],
    [(f'shared_experts("{name}")', shared_experts(name)) for name in ("shared_experts", "shared_expert", "shared_mlp")],
    [("SHARED_GATE", llama_table.SHARED_GATE)],
    [("EXPERT_BIAS", llama_table.EXPERT_BIAS)],
]

# Part of a table -> the fields of HfConfig that build it.
_FIELDS = {"QKV_BIAS": "qkv_bias=True", "QK_NORM": "qk_norm=True", "POST_NORMED": "pre_norms=False, post_norms=True"}


@dataclass(frozen=True)
class Draft:
    """A family's file, the JSON of its example, and what a person has to decide before they are complete."""

    model_type: str
    parts: list[str]  # expressions whose sum is the table
    unknown_tensors: list[str]  # {L} and {E} stand for the numbers of the block and of the expert
    missing_tensors: list[str]  # of the table
    unknown_keys: dict[str, Any]  # of config.json
    text: str = ""
    example: str = ""

    @property
    def tasks(self) -> list[str]:
        """What is left to do, one line each."""
        return [
            *(f"read, ignore or fix the key {key}={value!r}"[:_COLUMNS] for key, value in self.unknown_keys.items()),
            *(f"add a rule for the tensor {name}" for name in self.unknown_tensors),
            *(f"remove the rule for the tensor {name}" for name in self.missing_tensors),
            f"compare the model in modular_{self.model_type}.py or modeling_{self.model_type}.py of transformers",
        ]


def draft_family(raw: dict[str, Any]) -> Draft:
    """Return the draft for a config.json. Raises ProblemError if transformers has no causal language model for it."""
    kind, classes = str(raw.get("model_type")), raw.get("architectures") or []
    model = _model_without_weights(raw)
    names = _tensor_patterns(model)
    chosen = [part for group in _PARTS for part in [_first_that_fits(group, names)] if part]
    base = POST_NORMED if _names(POST_NORMED) <= names else DENSE
    replaced = {key for _, part in chosen for key in part}
    wanted = _names({key: rule for key, rule in base.items() if key not in replaced})
    of_parts = {name for _, part in chosen for name in _names(part)}
    unknown = sorted(names - wanted - of_parts)
    mixture = any(name.endswith("{E}.down_proj.weight") or ".experts." in name for name in names)
    usual_names = any(".self_attn." in name for name in names)
    may_lack_mlp = mixture and usual_names and not any(map(_OTHER_MLP.fullmatch, unknown))
    missing = sorted(name for name in wanted - names - {_HEAD} if not (may_lack_mlp and ".mlp." in name))
    keys = {key: value for key, value in raw.items() if _is_unknown(key, value)}
    architecture = str(classes[0]) if classes else type(model).__name__
    parts = ["DENSE" if base is DENSE else "POST_NORMED", *(expression for expression, _ in chosen)]
    made = Draft(kind, parts, unknown, missing, keys)
    return replace(made, text=_text(made, architecture), example=_example(made, architecture, raw))


def _model_without_weights(raw: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    layers = raw.get("num_hidden_layers") or _BLOCKS
    of_blocks = [value for value in raw.values() if _of_blocks(value, layers)]
    # the first blocks, so many that each kind of block is among them
    firsts = [value.index(kind) + 1 for value in of_blocks for kind in value if isinstance(kind, str)]
    blocks = min(layers, max(_BLOCKS, *firsts, 0))
    few = {key: value[:blocks] if _of_blocks(value, layers) else value for key, value in raw.items()}
    few |= dict(num_hidden_layers=blocks)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**few))
    except (ValueError, TypeError, KeyError) as error:
        said = f"transformers builds no causal language model of model_type {raw.get('model_type')!r}: "
        said += str(error).partition(". ")[0]
        raise ProblemError(Problem(("model",), f"{said}; write the file by hand: docs/add_a_model.md")) from None


def _of_blocks(value: Any, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers


def _tensor_patterns(model: Any) -> set[str]:
    """Return the names in the model's files, with {L} and {E} for the numbers of the block and the expert."""
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, dict(model.state_dict()))
    names = (re.sub(r"\.layers\.\d+\.", ".layers.{L}.", name) for name in state)
    return {re.sub(r"\.experts\.\d+\.", ".experts.{E}.", name) for name in names}


def _names(table: Table) -> set[str]:
    return {name for rule in table.values() for name in rule.names}


def _first_that_fits(group: list[tuple[str, Table]], names: set[str]) -> tuple[str, Table] | None:
    return next((part for part in group if _names(part[1]) <= names), None)


def _is_unknown(key: str, value: Any) -> bool:
    if key in HARMLESS or key in COMMON or key == "layer_types" or value is None:
        return False
    return key not in FIXED or value != FIXED[key][0]


def _text(draft: Draft, architecture: str) -> str:
    table = " | ".join(draft.parts)
    mixture = _is_mixture(draft)
    imports = ", ".join(sorted({word for word in re.findall(r"[A-Za-z_]+", table) if hasattr(llama_table, word)}))
    family = "EXPERT_KEYS, Family, expert_problems" if mixture else "Family"
    fields = [field for part in draft.parts if (field := _FIELDS.get(part))]
    lines = [
        f'"""TODO: the models of {draft.model_type}, and what differs from a Llama."""',
        "",
        "from __future__ import annotations",
        "",
        *(["from dataclasses import replace", ""] if fields else []),
        f"from megagrpo.families.parts.llama_table import {imports}",
        f"from megagrpo.families.shared.family import {family}",
        "",
        *(f"# TODO: {task}" for task in draft.tasks),
        "FAMILY = Family(",
        f'    "{draft.model_type}",',
        f'    "{architecture}",',
        f"    table=lambda hf: {table},",
        *([f"    read=lambda raw, common: replace(common, {', '.join(fields)}),"] if fields else []),
        *(["    problems=expert_problems,", "    keys=EXPERT_KEYS,"] if mixture else []),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _example(draft: Draft, architecture: str, raw: dict[str, Any]) -> str:
    """Return the JSON of the example: config.json as published, and a tiny model with the plainest options."""
    case = dict(head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
    release = dict(model_type=draft.model_type, architectures=[architecture]) | raw
    example = dict(models="TODO", differs="TODO", cases={draft.model_type: case if _is_mixture(draft) else {}})
    return json.dumps(example | dict(release=release), indent=1) + "\n"


def _is_mixture(draft: Draft) -> bool:
    return any(part.startswith("experts(") for part in draft.parts)


def _text_model(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return config.json of the text model, and the line of code for the multimodal model around it; "" for a model of
    text."""
    if not isinstance(text := raw.get("text_config"), dict):
        return raw, ""
    classes = raw.get("architectures") or ["TODO"]
    return text, f'wrappers=(Wrapper("{raw.get("model_type")}", "{classes[0]}"),),'


def write_draft(options: argparse.Namespace) -> None:
    """Write both files and print what is left to do. Raises ConfigError for an unusable model, or if a file exists."""
    if options.model.name != "config.json" and not options.model.is_dir():
        raise ConfigError(f"{options.model} is neither a folder nor a config.json; name one")
    raw = read_raw_config(options.model if options.model.is_dir() else options.model.parent)
    raw, line = _text_model(raw)
    kind = str(raw.get("model_type"))
    if line and family_of(kind):
        raise ConfigError(f"{options.model}: its text model {kind} is supported; add to its file: {line}")
    if family_of(kind) and options.out is None:
        raise ConfigError(f"{options.model}: model_type {kind} is supported; name a file with --out to draft it anyway")
    out = options.out or FAMILIES / f"{kind}.py"
    example = (out.parent if options.out else EXAMPLES) / f"{out.stem}.json"
    if existing := next((file for file in (out, example) if file.exists()), None):
        raise ConfigError(f"--out: {existing} exists; name a new file")
    try:
        draft = draft_family(raw)
    except ProblemError as error:
        raise ConfigError(str(error)) from None
    out.write_text(draft.text)
    example.write_text(draft.example)
    tasks = [*draft.tasks, *([f"add {line}"] if line else [])]
    lines = [f"{out}: {' | '.join(draft.parts)}", *(f"  {task}" for task in tasks), f"{example}: the example"]
    show("\n".join([*lines, f"next: finish both files, then python -m tests.prove_family {kind}"]))


def main(words: Sequence[str]) -> int:
    """Write the draft, and return the exit code."""
    with one_command() as ended:
        parser = Parser(prog="new_family.py", description=__doc__)
        parser.add_argument(
            "model", type=Path, metavar="FOLDER_OR_CONFIG", help="config.json, or the folder that holds it"
        )
        parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: families/own)")
        write_draft(parser.parse_words(words))
    return ended.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
