"""A policy and a vLLM server on the same GPU, put together from the parts that a run is put together from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megagrpo import device
from megagrpo.bridge.families import blocks
from megagrpo.config import RunConfig, weight_path
from megagrpo.engine.client import VllmEngine
from megagrpo.families.config import HfConfig, load_hf_config
from megagrpo.parallel.layout import Layout, init_layout
from megagrpo.policy.build import build_model
from megagrpo.policy.megatron_policy import MegatronPolicy
from megagrpo.servers.serving import make_launcher, name_of, servers_sleep
from megagrpo.trainer.gpu_turns import SyncHandover
from megagrpo.trainer.offload import NoOffload, Offload
from megagrpo.weight_sync.sync import SyncReport, WeightSync, make_transport


@dataclass
class Pair:
    """Both sides, after the server has started. `policy` is None where only weights were made, `chunks` are them."""

    config: RunConfig
    hf_config: HfConfig
    layout: Layout
    policy: MegatronPolicy | None
    chunks: list[nn.Module]
    engine: VllmEngine
    weight_sync: WeightSync
    offload: NoOffload | Offload
    transport: str
    base_gib: float  # of the GPU that was in use before there was a server: this process's CUDA context above all
    started_gib: float  # that the server took
    version: int = 0

    def push(self) -> SyncReport:
        """Give the server the weights as they are, in their next version."""
        self.version += 1
        return self.weight_sync.push(blocks(self.chunks, self.hf_config, self.layout), self.version, SyncHandover(self.offload))

    def held_gib(self) -> tuple[float | None, float | None]:
        """(what this process's allocator holds of the GPU, all that is in use beside that: the server's); None without a GPU."""
        if not device.has_gpu():
            return None, None
        return own_gib(), used_gib() - own_gib() - self.base_gib

    def sleep(self) -> None:
        """Have the server give its memory back; nothing without a GPU."""
        self.engine.sleep()


@contextmanager
def pair(config: RunConfig, scratch: Path, trains: bool, offloads: bool = False) -> Iterator[Pair]:
    """On the model in the folder `config.model.path`, whose weights are random on both sides. With `trains` the policy has gradients and
    an optimizer, and with `offloads` it leaves the GPU at the end of each push. The server starts first: vLLM takes what others allocate
    meanwhile for its own. It sleeps until the first push."""
    folder = Path(config.model.path)
    hf_config = load_hf_config(folder)
    dtype = device.resolve_precision(config.model.precision)
    engine_dtype = name_of(device.engine_precision(dtype))
    transport, _ = weight_path(config, device.has_gpu(), one_host=True)
    with ExitStack() as resources:
        layout = init_layout(config.parallel, config.run.seed)
        resources.callback(layout.close)
        base_gib = used_gib() - own_gib()
        launcher = resources.enter_context(make_launcher(config, folder, scratch, engine_dtype, num_ranks=1))
        launcher.start()
        urls = launcher.wait(lambda text: print(text, flush=True))
        options = dict(sleeps=servers_sleep(config), refills=transport == "shared_memory", token=launcher.token, logs=launcher.logs)
        engine = VllmEngine(urls, lambda ids: "", max_num_seqs=config.rollout.max_num_seqs, **options)
        started_gib = used_gib() - own_gib() - base_gib
        engine.sleep()
        policy = MegatronPolicy(config, layout, hf_config) if trains else None
        chunks = policy.chunks if policy else build_model(hf_config, layout, dtype=dtype)
        offload = Offload(policy) if policy and offloads else NoOffload()
        limits = dict(seconds=config.rollout.weight_sync_timeout, megabytes=config.rollout.weight_sync_bucket_megabytes)
        way = make_transport(transport, layout, engine_dtype, device.device(), **limits)
        weight_sync = resources.enter_context(WeightSync(engine, layout, engine_dtype, way))
        yield Pair(config, hf_config, layout, policy, chunks, engine, weight_sync, offload, transport, base_gib, started_gib)


def used_gib() -> float:
    """Of this rank's GPU, by all processes; 0 without a GPU."""
    if not device.has_gpu():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def own_gib() -> float:
    """What this process's allocator holds of its GPU, the CUDA context apart; 0 without a GPU."""
    return torch.cuda.memory_reserved() / 2**30 if device.has_gpu() else 0.0
