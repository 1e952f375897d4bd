"""Reports what loading a Hugging Face model would do, from config.json and the headers of its files.

The checks are those of loading, of `megagrpo plan` and of the families. No weights are read, except a head and the
embeddings that config.json ties to it, if the files hold both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megagrpo.config import ParallelSection, ProblemError
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, load_hf_config, model_problems
from megagrpo.families.weight_sources import INDEX, SINGLE, indexed_files, shape_folder
from megagrpo.planner.costs.shapes import modules_of, num_active_parameters, num_parameters
from megagrpo.planner.rules.vllm_problems import unserved_problems
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.weights.blocks.planned_blocks import tensor_shapes
from megagrpo.weights.bridge.load import INV_FREQ, Checkpoint, embedding_and_head
from megagrpo.weights.files.tensor_files import dtype_name

Shapes = dict[str, tuple[int, ...]]


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
    report.facts |= _facts_of_config(config)
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


def _facts_of_config(config: HfConfig) -> dict[str, Any]:
    embedding, head = embedding_and_head(config)
    experts = [name for layer in range(config.num_layers) for name in config.expert_parameters(layer).values()]
    return {
        "family": config.family,
        "architecture": FAMILIES[config.family].architecture,
        "multimodal": config.wrapper and [config.wrapper.model_type, config.wrapper.architecture],
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "parameters": num_parameters(config),
        "active_parameters": num_active_parameters(config),
        "config_dtype": config.dtype,
        "head": head,
        "tied_to": embedding if config.tied_embeddings else None,
        "lora_target_modules": _last(modules_of(config, range(config.num_layers)), 1),
        "lora_target_parameters": _last(experts, 2),
    }


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
    for reason, names in facts.get("kept", {}).items():
        if names:
            yield "kept", f"tensors: {_counted(names, reason)}"
    own = f"; the files' {facts['head']} is a copy, and an export writes it" if facts.get("own_head") else ""
    yield "head", f"tied to {facts['tied_to']}{own}" if facts["tied_to"] else f"{facts['head']}, not tied"
    modules, parameters = facts["lora_target_modules"], facts["lora_target_parameters"]
    yield "LoRA", ", ".join(modules) + (f"; in experts: {', '.join(parameters)}" if parameters else "")


def _counted(names: list[str], reason: str = "") -> str:
    """Return the number of tensors, the reason, and the first two names."""
    more = f", {names[1]}, ..." if len(names) > 1 else ""
    return f"{len(names):,}{reason and ', '}{reason}: {names[0]}{more}"


def _size(nbytes: int) -> str:
    unit, name = next(
        pair for pair in ((1e9, "GB"), (1e6, "MB"), (1, "bytes")) if nbytes >= pair[0] / 10 or pair[0] == 1
    )
    return f"{nbytes / unit:,.2f} {name}" if unit > 1 else f"{nbytes:,} bytes"
