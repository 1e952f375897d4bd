"""The worker side of weight sync: a vLLM weight-transfer engine that reads only the slices its loaders copy.

vLLM finds `register` through the entry point group `vllm.general_plugins`. Select it with `--weight-transfer-config
'{"backend": "megagrpo"}'`. vLLM answers 200 to a partial update and to corrupted data. So every worker checks
completeness before the update ends, and leaves a report. The trainer verifies the reports before the engine serves.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import socket
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from megagrpo.platform.process.cleanup.ownership import CPU_WORKERS, name_segments_by_owner, owned
from megagrpo.platform.process.cleanup.parent_death import tie_process_tree
from megagrpo.platform.rendezvous.store_exchange import clear_frames
from megagrpo.sync.vllm_side.cpu.cpu_kernels import (
    attend_in_float32,
    rotate_all_heads,
    route_as_one_group,
    see_whole_images,
)
from megagrpo.sync.vllm_side.cpu.cpu_parallelism import (
    compute_frozen_experts,
    count_workers_of_a_node,
    exchange_tokens,
    make_stage_buffers,
    use_expert_map,
)
from megagrpo.sync.vllm_side.cpu.cpu_routed_experts import return_routed_experts
from megagrpo.sync.vllm_side.loading import AdapterWrappers, Loading, first_names
from megagrpo.sync.vllm_side.reader import ShardReader
from megagrpo.sync.vllm_side.receiver import Receiver, Worker, receiver_class
from megagrpo.sync.vllm_side.unpacking import register_loader
from megagrpo.types import WeightSyncError

WEIGHT_BACKEND = "megagrpo"
logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend in this process, and tie EngineCore and workers to the life of their parent. vLLM calls this
    function in every process, sometimes more than once."""
    tie_process_tree()
    name_segments_by_owner()
    listen_on_own_address()
    if current_platform.is_cpu():
        use_expert_map()
        exchange_tokens()
        make_stage_buffers()
        compute_frozen_experts()
        return_routed_experts()
        count_workers_of_a_node()
        rotate_all_heads()
        route_as_one_group()
        see_whole_images()
        attend_in_float32()
        name_file_stores_by_owner()
    register_loader()
    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, __name__, "ShardEngine")


def name_file_stores_by_owner() -> None:
    """Name the shared-memory files of CPU workers after the engine's process. vLLM names them after a file store."""
    # imports most of vLLM, which the plugin loader has not done in every process
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_file_store_init_method = lambda: f"file://{tempfile.gettempdir()}/{owned(CPU_WORKERS)}"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: nothing is agreed beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The version of one update, the class of the transport's receiver, and the request for it (`Update.request`)."""

    version: int = -1
    receiver: str = ""
    request: dict[str, Any] = field(default_factory=dict)


class ShardEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The weight-transfer engine of one worker.

    After a failed update each layer has all of its old weights or all of its new ones, so the next update starts clean.
    The trainer keeps the engine paused until an update succeeds. Failures are reported, never raised. If several
    workers raise, vLLM (seen in 0.32) reads the first and takes the others for answers to its next call.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrappers = AdapterWrappers(self.model)
        self.loading = self._loading(towers=False)
        self.loadings = {False: self.loading}  # whether towers are filled -> the loading
        self.fills_towers = False  # of the next update
        self.receivers: dict[str, Receiver] = {}  # one per transport that has been used
        self.receiver: Receiver | None = None  # of the current update
        self.open = self.reloading = False  # open: vLLM's update is open; reloading: parameters are moved aside
        self.reader: ShardReader | None = None
        self.version = -1
        self.report = ""  # JSON of the report on the current update

    def _loading(self, towers: bool) -> Loading:
        self.wrappers.take_off()
        loading = Loading(self.model, self.model_config, towers)
        self.wrappers.put_back()
        return loading

    @property
    def worker(self) -> int:
        """Index of this worker within its server."""
        parallel = self.parallel_config
        return parallel.data_parallel_index * parallel.world_size + parallel.rank

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing: no setup is needed."""

    def shutdown(self) -> None:
        """Unmap the trainer's files and leave its process group."""
        for receiver in self.receivers.values():
            receiver.close()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Abstract up to vLLM 0.27. Raises NotImplementedError: our trainer does not use vLLM's trainer side."""
        raise NotImplementedError

    def start_weight_update(self) -> None:
        """Move the model's parameters aside, layer by layer, until the new ones are complete."""
        self._abort()
        towers, self.fills_towers = self.fills_towers, False
        if towers not in self.loadings:
            self.loadings[towers] = self._loading(towers)
        self.loading = self.loadings[towers]
        self.reader = None
        self.started = time.perf_counter()
        self.open = self.reloading = True
        self.report = ""
        self._note("start")
        self.wrappers.take_off()
        initialize_layerwise_reload(self.loading.trained)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load everything that the update holds. The base class fails without an accelerator, which it synchronizes."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:
            self._fail(error)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fill the model's parameters. Raises WeightSyncError unless every parameter is filled."""
        name, self.version = update_info.receiver, update_info.version
        if name not in self.receivers:
            worker = Worker(self.worker, self.device, lambda index: self.loading.dry_run(index))
            self.receivers[name] = receiver_class(name)(worker)
        self.receiver = self.receivers[name]
        source = self.receiver.open(update_info.request, update_info.version)
        self.reader = ShardReader(source, self.receiver.note)
        self.loading.load(self.reader)
        source.drain()
        self.reader.check_reads()

    def finish_weight_update(self) -> None:
        """Put the new parameters in place and report. An update that failed or received no weights is aborted."""
        try:
            self._finish()
        finally:
            self.wrappers.put_back()

    def _finish(self) -> None:
        if self.reader is None or not self.reloading:
            self._abort()
            self.open = False
            return
        self._note("finish")
        self.open = False
        try:
            finalize_layerwise_reload(self.loading.trained, self.model_config)
            if unread := self.reader.unread():
                raise WeightSyncError(f"{first_names(unread)} announced by the loaders, but never copied")
            if current_platform.is_cpu():
                refresh_packed_copies(self.model)
        except Exception as error:
            self._fail(error)
            return
        self.reloading = False
        proof = self.reader.source.proof(self.reader.reads)
        seconds = {
            "seconds": time.perf_counter() - self.started,
            "read_seconds": self.reader.seconds,
            "checksum_seconds": self.reader.checksum_seconds,
        }
        self._reply(version=self.version, bytes=self.reader.bytes, **proof, **seconds)
        self.reader.source.release()

    def _fail(self, error: Exception) -> None:
        clear_frames(error)
        if self.receiver is not None:
            self.receiver.abort()  # first, so that sending ranks get an error at once
        if self.reader is not None:
            self.reader.source.release()
        self._reply(error=f"{type(error).__name__}: {error}")
        self._abort()

    def _abort(self) -> None:
        """Leave the current reload, if any. Incomplete layers get their old weights back."""
        if not self.reloading:
            return
        # Otherwise vLLM would process a layer with part of its weights, and leave a layer that failed half processed.
        for module in self.loading.trained.modules():
            get_layerwise_info(module).load_numel = 0
        finalize_layerwise_reload(self.loading.trained, self.model_config)
        self.reloading = False

    def _note(self, activity: str) -> None:
        if self.receiver is not None:
            self.receiver.note(activity)

    def _reply(self, **report: Any) -> None:
        """Send a report to the trainer. If the trainer is gone, only log a warning."""
        report = {"worker": self.worker, **report}
        self.report = json.dumps(report)
        try:
            if self.receiver is not None:
                self.receiver.report(report)
        except (OSError, RuntimeError) as error:
            logger.warning("weight version %s: cannot send the report to the trainer: %s", self.version, error)


def refresh_packed_copies(model: nn.Module) -> None:
    """Rebuild vLLM for CPU's packed copies of the parameters, which a reload leaves stale (seen in 0.32 and 0.33).

    Experts: `UnquantizedFusedMoEMethod` skips its packing step on every reload. Tied heads: the head itself is never
    loaded, so the packed copy of the shared weight stays stale. Remove either part when a reload without it gives the
    log-probs of a fresh engine; the tests of weight sync check that.
    """
    seen: dict[int, nn.Module] = {}
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        first = seen.setdefault(id(weight), module)
        if first is not module and hasattr(first, "cpu_linear"):
            module.cpu_linear = first.cpu_linear


MODULES = ("torch.distributed.rendezvous", "vllm.distributed.utils")
"""The modules that create process groups' stores: torch's for a group's address, vLLM's for data-parallel copies."""


def listen_on_own_address() -> None:
    """Make the stores of this process's groups listen on the address of their rendezvous.

    By itself torch's TCPStore listens on every address, has no password, and lets any host change what the processes of
    a server tell each other. torch closes the socket passed to it. A second store of this process at the same port
    shares the first one's server.
    """
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if not hasattr(module.TCPStore, "__wrapped__"):
            module.TCPStore = _private(module.TCPStore)


def _private(store: Any) -> Any:
    """Return the class `store` with a constructor that passes a listening socket."""

    @functools.wraps(store, updated=())
    def construct(host_name: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if is_master and options.get("master_listen_fd") is None:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            try:
                options["master_listen_fd"] = socket.create_server(
                    (host_name, port), family=family, backlog=4096
                ).detach()
            except OSError:  # this process has a store at this port, or torch reports the port that is taken
                pass
        return store(host_name, port, *arguments, is_master=is_master, **options)

    return construct
