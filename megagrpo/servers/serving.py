"""vLLM servers on a model: those of a run, and those of commands that only ask it something."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from megagrpo import device
from megagrpo.bridge.adapters import ADAPTER_FILES
from megagrpo.bridge.checksums import verify_inside
from megagrpo.bridge.convert import export_alone
from megagrpo.config import ConfigError, RunConfig
from megagrpo.data.tokenizer import Tokenizer
from megagrpo.device import quiet
from megagrpo.engine.access import address_of, read_token
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http import MovedServers, check_urls, named_urls
from megagrpo.engine.protocol import EngineError, EngineStartError
from megagrpo.families.config import load_hf_config
from megagrpo.families.sources import resolve_model
from megagrpo.parallel.spawn import RankFailed, run_ranks
from megagrpo.process.terminal import warn
from megagrpo.records.checkpoint import BEST, STATE_FILE, newest_checkpoint
from megagrpo.servers.launcher import LORA_RANKS, Launcher, ServerOptions

ADAPTER = "adapter"  # what a server calls a LoRA adapter it was started with
LATEST = "latest"
ON_CPU = ("none", "fp8_per_channel")  # ways to keep weights that vLLM for CPU has


def name_of(dtype: torch.dtype) -> str:
    """As vLLM and Hugging Face call it: `float32`."""
    return str(dtype).removeprefix("torch.")


def engine_dtype(config: RunConfig) -> str:
    """What servers compute in beside FP8, and weights travel in, as vLLM calls it. It quantizes models in 16 bits alone."""
    if config.rollout.quantization != "none":
        return name_of(torch.bfloat16)
    return name_of(device.engine_precision(device.resolve_precision(config.model.precision)))


def make_launcher(
    config: RunConfig,
    model_folder: Path,
    log_folder: Path,
    dtype: str,
    adapter: Path | None = None,
    max_model_len: int | None = None,
    num_ranks: int = 0,
    host: str | None = None,
    token: str | None = None,
    moved: MovedServers | None = None,
) -> Launcher:
    """The servers that `rollout` describes, on `model_folder`, not yet started; they log into `log_folder`, and answer those who know
    `token`, by default one that is made here. With the PEFT folder `adapter` they also serve the model ADAPTER. `max_model_len` None: what
    the run and its evaluation need. `num_ranks` trainer ranks on this host have the first GPUs; dedicated servers get the others. `host` is
    the address that they listen on, None that of `rollout.interface`; `moved` is
    the Launcher's. ValueError when `adapter` is none, or there are too few GPUs, or
    none for `rollout.quantization` of this model, or there is no such interface."""
    r = config.rollout
    gpus = device.visible_gpus()
    if gpus is not None and r.placed == "dedicated":
        gpus = gpus[num_ranks:]
    if gpus is None and r.quantization != "none":
        _check_quantization(r.quantization, model_folder)
    options = ServerOptions(
        model=str(model_folder.resolve()),
        dtype=dtype,
        quantization=None if r.quantization == "none" else r.quantization,
        max_model_len=max_model_len or config.longest_sequence,
        tp=r.tp,
        expert_parallel=r.enable_expert_parallel,
        max_num_seqs=r.max_num_seqs,
        kv_cache_gb=r.kv_cache_gb,
        gpu_memory_utilization=r.gpu_memory_utilization,
        enforce_eager=r.enforce_eager,
        deterministic=config.run.deterministic,
        sleep_mode=servers_sleep(config) and num_ranks > 0,
        lora_rank=config.lora.rank if config.lora.syncs_adapters and adapter is None else 0,
        tool_parser=config.multi_turn.vllm_parser,
        tokenizer=config.model.tokenizer,
        extra_args=(*r.extra_args, *adapter_arguments(adapter)),
    )
    return Launcher(
        options,
        log_folder,
        num_servers=r.servers,
        port=r.port,
        devices=gpus,
        startup_timeout=r.startup_timeout,
        host=host or address_of(r.interface),
        token=token or secrets.token_urlsafe(32),
        max_restarts=r.max_restarts,
        moved=moved,
    )


def _check_quantization(quantization: str, model_folder: Path) -> None:
    """ValueError for what vLLM has no kernels for without a GPU."""
    key, usable = f"rollout.quantization: {quantization}", list(ON_CPU)
    if load_hf_config(model_folder).experts:
        key, usable = f"{key} of a model with experts", ["none"]
    if quantization not in usable:
        raise ValueError(f"{key} is what vLLM does on GPUs, and there are none here; set it to {' or '.join(usable)}")


def servers_sleep(config: RunConfig) -> bool:
    """Whether the servers of a training run give their GPU memory to the trainer while it trains."""
    return config.rollout.placed == "colocated" and device.has_gpu()


def offloads(config: RunConfig) -> bool:
    """Whether the trainer gives its memory to the servers of its run while they generate."""
    return servers_sleep(config) if config.train.offload is None else config.train.offload


def adapter_arguments(adapter: Path | None) -> list[str]:
    """What has vLLM serve a LoRA adapter that PEFT saved; nothing for None. ValueError for a folder that is none, or damaged."""
    if adapter is None:
        return []
    verify_inside(adapter)
    try:
        rank = int(json.loads((adapter / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--adapter: {adapter} holds no adapter_config.json of PEFT with a rank `r`: {error}") from error
    fits = next((known for known in LORA_RANKS if known >= rank), rank)
    return ["--enable-lora", "--max-lora-rank", str(fits), "--lora-modules", f"{ADAPTER}={adapter.resolve()}"]


def find_weights(config: RunConfig, checkpoint: str | None, scratch: Path, say: Callable[[str], None]) -> tuple[Path, Path | None]:
    """(Hugging Face folder, adapter or None) of what `checkpoint` names: nothing (the model of the config), `latest` or `best` of the run,
    a checkpoint of a run, a Hugging Face folder, or a PEFT folder. A checkpoint of weights is exported into `scratch` first, by a process
    of its own. ValueError when there is no such thing."""
    if checkpoint is None:
        return resolve_model(config.model.path), None
    runs = Path(config.run.output_dir) / config.run.name / "checkpoints"
    path = Path(checkpoint)
    if checkpoint in (LATEST, BEST):
        path = (newest_checkpoint(runs) if checkpoint == LATEST else runs / BEST) or runs / LATEST
    if (path / "adapter_config.json").is_file():
        return resolve_model(config.model.path), path
    if (path / ADAPTER_FILES / "adapter_config.json").is_file():
        return resolve_model(config.model.path), path / ADAPTER_FILES
    if (path / "config.json").is_file():
        return path, None
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"--checkpoint: {path} is no checkpoint of a run, no Hugging Face folder and no adapter")
    say(f"exporting {path.resolve()}")
    try:
        # On the CPU: there every layer is one whose structure takes no memory.
        run_ranks(export_alone, 1, path.resolve(), scratch / "hf", timeout=3600, env={"CUDA_VISIBLE_DEVICES": ""})
    except RankFailed as error:
        raise ValueError(f"--checkpoint: {path}: {error}") from error
    return scratch / "hf", None


class Serving:
    """Servers for one command: `find` the weights, `start`, do something else while they load, then ask `engine`. A context manager; on
    the way out servers end and scratch files go. With `rollout.urls` those servers answer and nothing is started."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]):
        self._config, self._say = config, say
        self._resources = ExitStack()
        self._launcher: Launcher | None = None
        self.folder, self.adapter = Path(), None

    def find(self, checkpoint: str | None, adapter: str | None) -> Path:
        """The Hugging Face folder whose tokenizer and weights are used. ValueError for what is not there, and for a choice of weights
        where the servers have theirs already."""
        urls = named_urls(self._config.rollout.urls, self._config.rollout.urls_file)
        if urls and (checkpoint or adapter):
            raise ValueError(f"rollout.urls: {', '.join(urls)} serve what they have; leave out --checkpoint and --adapter, or the urls")
        check_urls(urls)
        self._token = read_token(self._config.rollout.token_file)
        self._scratch = Path(self._resources.enter_context(tempfile.TemporaryDirectory(prefix="megagrpo_serving_")))
        self.folder, self.adapter = find_weights(self._config, checkpoint, self._scratch, self._say)
        if adapter is not None:
            self.adapter = Path(adapter)
        return self.folder

    def start(self, max_model_len: int | None = None) -> None:
        """Start the servers, for sequences of up to `max_model_len` tokens."""
        if self._config.rollout.urls:
            return
        self._launcher = make_launcher(
            self._config, self.folder, self._scratch, engine_dtype(self._config), self.adapter, max_model_len, token=self._token
        )
        self._resources.callback(self._launcher.stop)
        self._launcher.start()

    def engine(self, tokenizer: Tokenizer) -> VllmEngine:
        """The client, once they answer. EngineStartError, with the end of the log, when they do not."""
        r, launcher = self._config.rollout, self._launcher
        urls = launcher.wait(self._say) if launcher else named_urls(r.urls, r.urls_file)
        model = ADAPTER if self.adapter else None
        logs = launcher.logs if launcher else ()
        return VllmEngine(
            urls,
            tokenizer.decode,
            max_num_seqs=r.max_num_seqs,
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


def exit_code(command: Callable[[], None], name: str) -> int:
    """Run a command that asks servers: 0, 1 when a server failed on the way, 128 + its number after a signal. ConfigError when no server
    starts. `name` is what stops then, for the message."""
    quiet()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        command()
    except EngineStartError as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        warn(f"{name} stops: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
