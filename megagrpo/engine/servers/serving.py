"""vLLM servers for training runs, and for commands that only generate."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megagrpo.config import ConfigError, LoraSection, ProblemError, RolloutSection, RunConfig
from megagrpo.data.tokens.tokenizer import Tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.access import address_of
from megagrpo.engine.http.probe import check_tool_parser
from megagrpo.engine.http.protocol import EngineError, EngineStartError
from megagrpo.engine.http.server_calls import check_urls, named_urls
from megagrpo.engine.servers.command_line import LORA_RANKS
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerNode, ServerOptions
from megagrpo.families.family_index import FAMILIES
from megagrpo.families.hf_config import HfConfig, load_hf_config, read_raw_config
from megagrpo.families.parts.llama_table import EMBEDDING
from megagrpo.families.shared.precisions import QUANTIZATION
from megagrpo.families.shared.recurrence import GatedDelta
from megagrpo.families.weight_sources import resolve_model
from megagrpo.platform import device
from megagrpo.platform.device import quiet
from megagrpo.platform.process.access_token import read_token
from megagrpo.platform.process.cleanup.removal import temporary_folder
from megagrpo.platform.process.open_files import raise_open_files
from megagrpo.platform.process.terminal import warn
from megagrpo.records.checkpoints.run_files import STATE_FILE, named_checkpoint, why_no_checkpoint
from megagrpo.records.progress_bars import conversion_progress, run_progress
from megagrpo.weights.bridge.adapter_files import ADAPTER_FILES, CONFIG, WEIGHTS
from megagrpo.weights.bridge.conversion import export_alone
from megagrpo.weights.bridge.hf_files import narrows
from megagrpo.weights.bridge.load import Checkpoint
from megagrpo.weights.files.file_checksums import verify_inside
from megagrpo.weights.files.tensor_files import TensorFile, dtype_name
from megagrpo.weights.files.torch_dist import StoredTensors

ADAPTER_MODEL = "adapter"  # name of the LoRA adapter that a server was started with
ON_CPU = ("none", "fp8_per_channel")  # quantizations that vLLM for CPU supports


def engine_dtype(quantization: str, precision: str, trained: torch.dtype | None = None) -> str:
    """Return vLLM's name for the servers' compute dtype, which is also the dtype of synced weights. It is bfloat16 with
    quantization, because vLLM quantizes 16-bit models only.

    `trained` is the dtype in which a run, on any machine, trained the weights; the `precision` "auto" means it.
    """
    if quantization != "none":
        return dtype_name(torch.bfloat16)
    of_run = trained if precision == "auto" else None
    return dtype_name(device.engine_precision(of_run or device.resolve_precision(precision)))


def make_launcher(
    config: RunConfig,
    model_folder: Path,
    log_folder: Path,
    dtype: str,
    adapter: Path | None = None,
    max_model_len: int | None = None,
    num_ranks: int = 0,
    token: str | None = None,
    **fields: Any,
) -> Launcher:
    """Build the launcher of the servers that `rollout` describes, on `model_folder`; nothing is started.

    The servers log to `log_folder` and require `token`; None generates one. With the PEFT folder `adapter` they also
    serve it as the model ADAPTER_MODEL. `max_model_len` None means the longest sequence of the run and its evaluation.
    `num_ranks` trainer ranks on this host use the first GPUs; dedicated servers get the other GPUs. `fields` are other
    fields of the Launcher: by default it starts all servers of the run, on the address of `rollout.interface`.

    Raises ValueError when `adapter` is invalid, GPUs are missing, `rollout.quantization` of this model needs a GPU, the
    interface does not exist, or a server on several nodes is to be started on this host alone.
    """
    r = config.rollout
    gpus = device.visible_gpus()
    model = known_model(model_folder)
    _check_place(r, model_folder, model, dtype, gpus is None, fields.get("node"))
    if gpus is not None and r.placed == "dedicated":
        gpus = gpus[num_ranks:]
    if "host" not in fields:
        fields["host"] = address_of(r.interface)
    options = _options(config, model_folder, model, dtype, adapter, max_model_len, beside_ranks=num_ranks > 0)
    limits = dict(port=r.port, startup_timeout=r.startup_timeout, max_restarts=r.max_restarts)
    fields = limits | {"num_servers": r.servers} | fields
    return Launcher(options, log_folder, devices=gpus, token=token or secrets.token_urlsafe(32), **fields)


def _check_place(
    r: RolloutSection, model_folder: Path, model: HfConfig | None, dtype: str, on_cpu: bool, node: ServerNode | None
) -> None:
    """Raise ValueError for servers on several nodes without this host's `node`, and for models that vLLM has no kernels
    for on a CPU, in this dtype or quantization."""
    if r.nodes_per_server > 1 and node is None:
        raise ValueError(
            f"rollout.nodes_per_server: {r.nodes_per_server}, but this command starts servers on this host only; start "
            "them with `megagrpo serve --head` on every node and name them in rollout.urls, use `megagrpo submit`, or "
            "set nodes_per_server to 1"
        )
    if on_cpu and model and (reason := FAMILIES[model.family].gpu_only):
        raise ValueError(f"model.path: {reason} ({model.family}); use a GPU, or servers with GPUs in rollout.urls")
    if on_cpu and dtype != "bfloat16" and model and isinstance(model.recurrence, GatedDelta):
        raise ValueError(
            f"model.precision: vLLM computes Gated DeltaNet on a CPU in bfloat16 only, not in {dtype}; set it to bf16, "
            "or use a GPU"
        )
    if dtype != "bfloat16" and model and model.activation == "xielu":
        said = f"vLLM keeps the parameters of xIELU ({model.family}) in bfloat16, not in {dtype}"
        raise ValueError(f"model.precision: {said}; set it to bf16")
    if on_cpu and r.quantization != "none":
        _check_quantization(r.quantization, model_folder)


def known_model(model_folder: Path) -> HfConfig | None:
    """Return the architecture; None for a model that only vLLM knows."""
    try:
        return load_hf_config(model_folder)
    except ProblemError:
        return None


def served_flags(model: HfConfig | None) -> Mapping[str, Any]:
    """Return vLLM's flags, with words or JSON values, that the model's family needs."""
    return {} if model is None else FAMILIES[model.family].served_flags(model)


def _is_packed(model_folder: Path) -> bool:
    """Whether the files hold tensors that the plugin computes; False for files that only vLLM can read."""
    try:
        return bool(Checkpoint(model_folder).views)
    except ValueError:
        return False


def _options(
    config: RunConfig,
    model_folder: Path,
    model: HfConfig | None,
    dtype: str,
    adapter: Path | None,
    max_model_len: int | None,
    beside_ranks: bool,
) -> ServerOptions:
    """Return vLLM's options of `rollout`'s servers. `beside_ranks`: they may share GPUs with trainer ranks."""
    r = config.rollout
    rows = config.has_own_sampling
    agents = any(task.config.multi_turn.agent for task in config.each_task)
    return ServerOptions(
        model=str(model_folder.resolve()),
        dtype=dtype,
        quantization=None if r.quantization == "none" else r.quantization,
        packed=_is_packed(model_folder),
        packed_text=model is not None
        and model.wrapper is not None
        and not read_raw_config(model_folder).get(QUANTIZATION),
        family_flags=dict(served_flags(model)),
        max_model_len=max_model_len or config.longest_sequence,
        tp=r.tp,
        pp=r.pp,
        dp=r.dp,
        nodes=r.nodes_per_server,
        expert_parallel=r.enable_expert_parallel,
        returns_routes=r.routing_replay == "engine",
        max_num_seqs=r.max_num_seqs,
        kv_cache_gb=r.kv_cache_gb,
        gpu_memory_utilization=r.gpu_memory_utilization,
        enforce_eager=r.enforce_eager,
        deterministic=config.run.deterministic,
        sleep_mode=servers_sleep(r) and beside_ranks,
        lora_rank=config.lora.rank if config.lora.syncs_adapters and adapter is None else 0,
        takes_base=config.syncs_weights,
        adapters=max(1, config.synced_adapters),
        lora_modules=_adapted(config.lora, model_folder) if config.lora.syncs_adapters else (),
        tool_parser=config.multi_turn.vllm_parser,
        # an agent's requests may have stop strings, and rows theirs
        finds_text=bool(r.stop or agents or rows),
        constrains=bool(r.structured_outputs or rows or config.all_rewards.own_judges),
        tokenizer=config.model.tokenizer,
        recurrent=model is not None and model.recurrence is not None,
        text_only=model is not None and model.wrapper is not None and not config.data.images,
        images=config.data.images,
        extra_args=(*r.extra_args, *adapter_arguments(adapter)),
    )


def _adapted(lora: LoraSection, model_folder: Path) -> tuple[str, ...]:
    """Return the last parts of the names of all linears with adapters, such as q_proj."""
    model = load_hf_config(model_folder)
    of_layers = [names for layer in range(model.num_layers) for names in model.modules(layer).values()]
    return tuple(sorted({name.rpartition(".")[2] for names in of_layers for name in names if lora.adapts(name)}))


def _check_quantization(quantization: str, model_folder: Path) -> None:
    """Raise ValueError for a quantization that vLLM has no kernels for on a CPU."""
    key, usable = f"rollout.quantization: {quantization}", list(ON_CPU)
    if load_hf_config(model_folder).experts:
        key, usable = f"{key} of a model with experts", ["none"]
    if quantization not in usable:
        raise ValueError(f"{key} needs a GPU in vLLM, and this machine has none; set it to {' or '.join(usable)}")


def servers_sleep(rollout: RolloutSection) -> bool:
    """Whether the servers of a training run release their GPU memory while the trainer trains."""
    return rollout.placed == "colocated" and device.has_gpu()


def offloads(rollout: RolloutSection, offload: bool | None) -> bool:
    """Whether the trainer moves its state off the GPU while the run's servers generate: `train.offload`, if set."""
    return servers_sleep(rollout) if offload is None else offload


def adapter_arguments(adapter: Path | None) -> list[str]:
    """Return vLLM's arguments for serving a PEFT adapter; empty for None. Raises ValueError when the folder is not a
    PEFT adapter or is damaged."""
    if adapter is None:
        return []
    verify_inside(adapter)
    try:
        rank = int(json.loads((adapter / "adapter_config.json").read_text())["r"])
        names = list(TensorFile(adapter / WEIGHTS).entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--adapter: {adapter} holds no adapter_config.json of PEFT with a rank `r`: {error}"
        ) from error
    fits = next((known for known in LORA_RANKS if known >= rank), rank)
    served = f"{ADAPTER_MODEL}={adapter.resolve()}"
    arguments = ["--enable-lora", "--max-lora-rank", str(fits), "--lora-modules", served]
    if any(".experts." in name for name in names):
        return arguments
    return [*arguments, "--lora-target-modules", *sorted({name.split(".")[-3] for name in names})]


@dataclass(frozen=True)
class Weights:
    """Weights to serve: a Hugging Face folder, an adapter on it, if any, and vLLM's name of the dtype to serve in."""

    folder: Path
    adapter: Path | None
    dtype: str


def find_weights(config: RunConfig, checkpoint: str | None, scratch: Path, say: Callable[[str], None]) -> Weights:
    """Return the weights that the value `checkpoint` names, for servers in the precision of the run that trained them.

    `checkpoint` is None (the model of the config), `latest` or `best` of the run, a checkpoint of a run, a Hugging Face
    folder, or a PEFT folder. A checkpoint with full weights is first exported into `scratch` by a separate process.
    Raises ValueError when it does not exist or cannot be exported.
    """
    of_run = config.rollout.quantization, config.model.precision
    if checkpoint is None:
        return Weights(resolve_model(config.model.path), None, engine_dtype(*of_run))
    try:
        path = named_checkpoint(Path(config.run.output_dir) / config.run.name, checkpoint)
    except ValueError as error:
        raise ValueError(f"--checkpoint: {error}") from None
    for adapter in (path, path / ADAPTER_FILES):
        if (adapter / CONFIG).is_file():
            return Weights(resolve_model(config.model.path), adapter, engine_dtype(*of_run, _dtype_of_adapter(adapter)))
    if (path / "config.json").is_file():
        return Weights(path, None, engine_dtype(*of_run))
    if why := why_no_checkpoint(path):
        raise ValueError(f"--checkpoint: {path} {why}")
    if not (path / STATE_FILE).is_file():
        raise ValueError(
            f"--checkpoint: {path} is not a run's checkpoint: it lacks {STATE_FILE}; export it, and name the exported "
            "folder"
        )
    from megagrpo.platform.parallel.spawn import RankFailed, run_ranks  # imported late: it imports torch._dynamo

    try:
        trained = StoredTensors(path).dtype(EMBEDDING)
        dtype = engine_dtype(*of_run, trained)
        if narrows(trained, getattr(torch, dtype)):
            cause = "rollout.quantization" if config.rollout.quantization != "none" else "model.precision"
            say(f"{path}: trained in {dtype_name(trained)}, served in {dtype} ({cause})")
        say(f"exporting {path.resolve()}")
        # On the CPU: there the structure of every layer can be built without allocating its weights.
        run_ranks(_export, 1, path.resolve(), scratch / "hf", dtype, timeout=3600, env={"CUDA_VISIBLE_DEVICES": ""})
    except (RankFailed, ValueError) as error:
        raise ValueError(f"--checkpoint: {path}: {error}") from error
    return Weights(scratch / "hf", None, dtype)


def _dtype_of_adapter(adapter: Path) -> torch.dtype | None:
    """Return the dtype of an adapter in a run's checkpoint, which is the run's; None for an adapter from elsewhere."""
    if not (adapter.parent / STATE_FILE).is_file():
        return None
    return next(iter(TensorFile(adapter / WEIGHTS).entries.values())).dtype


def _export(checkpoint: Path, out: Path, dtype: str) -> None:
    export_alone(checkpoint, out, conversion_progress(), getattr(torch, dtype))


class Serving:
    """Servers for one command: `find` the weights, `start`, do other work while they load, then use `engine`.

    A context manager: on exit servers stop and scratch files are removed. With `rollout.urls` it uses those instead.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]):
        self._config, self._say = config, say
        self._resources = ExitStack()
        self._launcher: Launcher | None = None
        self._weights = Weights(Path(), None, "")

    def find(self, checkpoint: str | None, adapter: str | None) -> Path:
        """Return the Hugging Face folder whose tokenizer and weights are used. Raises ValueError when the weights are
        missing, or when weights are chosen although `rollout.urls` names servers, which already have theirs."""
        urls = named_urls(self._config.rollout.urls, self._config.rollout.urls_file)
        if urls and (checkpoint or adapter):
            raise ValueError(
                f"rollout.urls: {', '.join(urls)} already have their weights; leave out --checkpoint and --adapter, or "
                "the urls"
            )
        check_urls(urls)
        self._token = read_token(self._config.rollout.token_file)
        check_tool_parser(urls, self._config.multi_turn.vllm_parser, self._token)
        self._scratch = self._resources.enter_context(temporary_folder("megagrpo_serving_"))
        self._weights = find_weights(self._config, checkpoint, self._scratch, self._say)
        if adapter is not None:
            self._weights = replace(self._weights, adapter=Path(adapter))
        return self._weights.folder

    def start(self, max_model_len: int | None = None) -> None:
        """Start the servers, for sequences of up to `max_model_len` tokens. Does nothing with `rollout.urls`."""
        if self._config.rollout.urls:
            return
        w, progress = self._weights, run_progress(self._config.run)
        model = self._config, w.folder, self._scratch, w.dtype, w.adapter, max_model_len
        self._launcher = make_launcher(*model, token=self._token, progress=progress)
        self._resources.callback(self._launcher.stop)
        self._launcher.start()

    def engine(self, tokenizer: Tokenizer) -> VllmEngine:
        """Wait until servers respond and return the client. Raises EngineStartError, with the log's end, if not."""
        r, launcher = self._config.rollout, self._launcher
        urls = launcher.wait(self._say) if launcher else named_urls(r.urls, r.urls_file)
        model = ADAPTER_MODEL if self._weights.adapter else None
        raise_open_files()
        logs = launcher.logs if launcher else ()
        return VllmEngine(
            urls,
            tokenizer.decode,
            max_num_seqs=r.max_num_seqs,
            copies=r.dp if launcher else 1,
            request_timeout=r.request_timeout,
            logs=logs,
            token=launcher.token if launcher else self._token,
            model=model,
            any_version=bool(r.urls),
        )

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


def with_servers[T](command: Callable[[], T], name: str) -> T:
    """Run a command that uses servers and return its result. `name` names the command in the error message.

    Raises ConfigError when no server starts, and SystemExit with the exit code 1 when a server failed, and 128 + the
    signal's number after a signal.
    """
    quiet()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return command()
    except EngineStartError as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        warn(f"{name} stops: {error}")
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
