"""A policy and a vLLM server on the same GPU, built from the components of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megagrpo.config import RunConfig, weight_path
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.servers.serving import make_launcher, servers_sleep
from megagrpo.families.hf_config import HfConfig, load_hf_config
from megagrpo.platform import device
from megagrpo.platform.parallel.layout import Layout, init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.policy.transformer.transformer_config import ModelOptions
from megagrpo.sync.trainer_side.sync import SyncReport, WeightSync
from megagrpo.sync.trainer_side.transport import TransportSettings, transport_class
from megagrpo.trainer.gpu.gpu_sharing import sync_handover
from megagrpo.trainer.gpu.state_offload import NoOffload, Offload
from megagrpo.weights.blocks.parameter_blocks import blocks
from megagrpo.weights.files.tensor_files import dtype_name


@dataclass
class Pair:
    """Both sides, after the server has started. `policy` is None if there are only weights, in `chunks`."""

    config: RunConfig
    hf_config: HfConfig
    layout: Layout
    policy: MegatronPolicy | None
    chunks: list[nn.Module]
    engine: VllmEngine
    weight_sync: WeightSync
    offload: NoOffload | Offload
    transport: str
    base_gib: float  # GPU memory in use before the server started: mostly this process's CUDA context
    started_gib: float  # GPU memory that the server has allocated
    version: int = 0

    def push(self) -> SyncReport:
        """Push the current weights to the server as their next version."""
        self.version += 1
        return self.weight_sync.push(
            blocks(self.chunks, self.hf_config, self.layout), self.version, sync_handover(self.offload)
        )

    def held_gib(self) -> tuple[float | None, float | None]:
        """(GPU memory of this process's allocator, all other GPU memory in use: the server's); None without a GPU."""
        if not device.has_gpu():
            return None, None
        return own_gib(), used_gib() - own_gib() - self.base_gib

    def sleep(self) -> None:
        """Put the server to sleep, which frees its memory; no effect without a GPU."""
        self.engine.sleep()


@contextmanager
def pair(config: RunConfig, scratch: Path, trains: bool, offloads: bool = False) -> Iterator[Pair]:
    """Build both sides on the model in the folder `config.model.path`, with random weights. With `trains` the policy
    has gradients and an optimizer; with `offloads` it leaves the GPU at the end of each push. The server starts first,
    because vLLM counts memory that others allocate meanwhile as its own. It sleeps until the first push."""
    folder = Path(config.model.path)
    hf_config = load_hf_config(folder)
    dtype = device.resolve_precision(config.model.precision)
    engine_dtype = dtype_name(device.engine_precision(dtype))
    transport, _ = weight_path(config, device.has_gpu(), one_host=True)
    kind = transport_class(transport)
    with ExitStack() as resources:
        layout = init_layout(config.parallel, config.run.seed)
        resources.callback(layout.close)
        base_gib = used_gib() - own_gib()
        launcher = resources.enter_context(make_launcher(config, folder, scratch, engine_dtype, num_ranks=1))
        launcher.start()
        urls = launcher.wait(lambda text: print(text, flush=True))
        options = dict(
            sleeps=servers_sleep(config.rollout), refills=kind.refills, token=launcher.token, logs=launcher.logs
        )
        engine = VllmEngine(urls, lambda ids: "", max_num_seqs=config.rollout.max_num_seqs, **options)
        started_gib = used_gib() - own_gib() - base_gib
        engine.sleep()
        policy = MegatronPolicy(config, layout, hf_config) if trains else None
        chunks = policy.chunks if policy else build_model(hf_config, layout, ModelOptions(dtype=dtype))
        offload = Offload(policy) if policy and offloads else NoOffload()
        r = config.rollout
        settings = TransportSettings(device.device(), r.weight_sync_timeout, r.weight_sync_bucket_megabytes)
        way = kind(layout, engine_dtype, settings)
        weight_sync = resources.enter_context(WeightSync(engine, layout, engine_dtype, way))
        yield Pair(
            config, hf_config, layout, policy, chunks, engine, weight_sync, offload, transport, base_gib, started_gib
        )


def used_gib() -> float:
    """Memory in use on this rank's GPU, by all processes; 0 without a GPU."""
    if not device.has_gpu():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def own_gib() -> float:
    """GPU memory of this process's allocator, without the CUDA context; 0 without a GPU."""
    return torch.cuda.memory_reserved() / 2**30 if device.has_gpu() else 0.0
