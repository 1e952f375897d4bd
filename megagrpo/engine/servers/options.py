"""The options that all vLLM servers of a run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerOptions:
    """Options that all servers of a run share. `dtype` is vLLM's compute dtype, float32 or bfloat16."""

    model: str
    dtype: str
    max_model_len: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1  # nodes that share the server
    max_num_seqs: int = 256
    kv_cache_gb: float = 2.0  # KV cache size, on a machine without a GPU
    expert_parallel: bool = False  # distribute whole experts over the tp x dp workers of a stage
    returns_routes: bool = False  # responses have the experts of every token and layer
    gpu_memory_utilization: float = 0.4
    quantization: str | None = None  # vLLM quantizes the weights to this when it loads them
    packed: bool = False  # the model's files hold packed tensors, which the plugin computes on loading
    packed_text: bool = False  # with `packed`: text_config names the quantization
    family_flags: dict[str, Any] = field(default_factory=dict)  # words or JSON values that the model's family needs
    enforce_eager: bool = False
    # batch-invariant: results do not depend on which requests are batched together; needs a GPU
    deterministic: bool = False
    sleep_mode: bool = False  # allow the server to release its GPU memory between rollouts
    lora_rank: int = 0  # largest rank of the adapters to load; 0 when weight syncs send full weights
    takes_base: bool = False  # with adapters: weight syncs also send the weights below them
    adapters: int = 1  # adapters that requests in one batch may use
    lora_modules: tuple[str, ...] = ()  # the linears that adapters may have; (): all that vLLM supports
    omp_threads: int | None = None  # threads per worker without a GPU; None divides all cores among the workers
    tool_parser: str | None = None  # vLLM's tool parser, for `VllmEngine.read_tool_calls`
    finds_text: bool = False  # load the tokenizer, so that texts can end a response (`SamplingParams.stop`)
    constrains: bool = False  # requests have structured outputs (`SamplingParams.constraint`)
    tokenizer: str | None = None  # tokenizer of tool parser and stop strings; None means the model's own
    text_only: bool = False  # a multimodal model that gets no images: the towers are not loaded
    images: bool = False  # requests have images, whose pixels are sent normalised
    recurrent: bool = False  # some blocks keep a state in place of keys and values
    extra_args: tuple[str, ...] = ()

    @property
    def sizes(self) -> str:
        """The parallel sizes as a product of keys, for messages."""
        sizes = {"tp": self.tp} | {name: size for name, size in (("pp", self.pp), ("dp", self.dp)) if size > 1}
        return " x ".join(f"rollout.{name} {size}" for name, size in sizes.items())

    @property
    def loads_tokenizer(self) -> bool:
        """Whether the servers need a tokenizer: all else is token ids."""
        return self.finds_text or self.constrains or self.images or self.tool_parser is not None

    @property
    def devices(self) -> int:
        """Workers of a server on each of its nodes, one per device."""
        return self.tp * self.pp * self.dp // self.nodes


@dataclass(frozen=True)
class ServerNode:
    """One node of a server on several nodes: its index, its address for other nodes, and the first node's address."""

    index: int
    address: str
    first: str


@dataclass(frozen=True)
class NodePorts:
    """Ports on the first node of a multi-node server: of torch's rendezvous and vLLM's data-parallel handshake."""

    rendezvous: int
    handshake: int
