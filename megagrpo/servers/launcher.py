"""Starts, watches and stops vLLM's OpenAI API servers, each in its own process group under a supervisor.

The trainer never imports vLLM: a server is a command line, a log file and an address. A supervisor (`supervisor.py`) ends the server with
all its processes when the trainer is gone, however it went.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, groupby, takewhile
from pathlib import Path

import httpx

from megagrpo.engine.access import FILE_VARIABLE, GUARD, TOKEN_VARIABLE
from megagrpo.engine.http import CERTIFICATES, MovedServers
from megagrpo.engine.protocol import EngineStartError
from megagrpo.transfer.shm_names import remove_stale

HOST = "127.0.0.1"
PORTS = range(15_000, 30_000)  # of servers whose port `rollout.port` leaves open
HERE = Path(__file__).parent
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
MAX_BATCHED_TOKENS = 4096  # of one prefill without a GPU
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
LOG_LINES = 30  # shown when a server does not start and none of its processes says why
ERROR = re.compile(r"\(\w+ pid=\d+\) ERROR \S+ \S+ \[[^\]]+\] ")  # before each line of what one of vLLM's processes logs
KILLED = {code: number for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}  # exit code -> signal
TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class ServerOptions:
    """What every server of a run has in common. `dtype` is what vLLM computes in, float32 or bfloat16."""

    model: str
    dtype: str
    max_model_len: int
    tp: int = 1
    max_num_seqs: int = 256
    kv_cache_gb: float = 2.0  # on a machine without a GPU
    expert_parallel: bool = False  # share out whole experts over the tp workers
    gpu_memory_utilization: float = 0.4
    quantization: str | None = None  # into which vLLM turns the weights as it loads them
    enforce_eager: bool = False
    deterministic: bool = False  # a request's numbers must not depend on those that it is decoded with; needs a GPU
    sleep_mode: bool = False  # be able to give GPU memory back between rollouts
    lora_rank: int = 0  # of adapters that will come; 0 when weights come instead
    omp_threads: int | None = None  # threads of each worker without a GPU; all cores shared among the workers when None
    tool_parser: str | None = None  # of vLLM, for `VllmEngine.read_tool_calls`
    tokenizer: str | None = None  # that it reads token ids with; the model's own when None
    extra_args: tuple[str, ...] = ()


@dataclass
class Server:
    """One running server: its name, log file, and the supervisor above it. The name is the URL that clients know; `address` is the one that
    it listens on, another one after a restart at a fresh port."""

    url: str
    log: Path
    supervisor: subprocess.Popen = field(repr=False)
    started: float = 0.0  # by the monotonic clock
    address: str = ""  # the URL itself when empty

    def __post_init__(self):
        self.address = self.address or self.url

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self.supervisor.poll() is None

    @property
    def killed(self) -> bool:
        """Whether somebody else has ended it, not it itself: the kernel, for want of memory, or a person."""
        return self.supervisor.returncode in KILLED

    @property
    def fate(self) -> str:
        """How it has ended, in words."""
        code = self.supervisor.returncode
        return f"was killed by {KILLED[code].name}" if self.killed else f"ended with exit code {code}"

    def end(self) -> None:
        """End it with all its processes: SIGTERM, then SIGKILL. Does nothing to one that has ended."""
        if self.alive:
            self.supervisor.send_signal(signal.SIGTERM)
        try:
            self.supervisor.wait(GRACE_SECONDS + 5)
        except subprocess.TimeoutExpired:
            os.killpg(self.supervisor.pid, signal.SIGKILL)
            self.supervisor.wait()

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of its log, all of it with 0."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"({self.log}: {error.strerror})"

    def cause(self) -> str:
        """The first exception that one of its processes has logged, without its stack; empty when there is none.

        The end of the log has only that of the process above, which says that another one failed.
        """
        found = [match for line in self.log_tail(0).splitlines() if (match := ERROR.match(line))]
        for _, record in groupby(found, key=lambda match: match[0]):
            lines = [match.string[match.end() :] for match in record]
            if TRACEBACK in lines:
                said = dropwhile(lambda line: line.startswith(" "), lines[lines.index(TRACEBACK) + 1 :])
                return " ".join(takewhile(str.strip, said))
        return ""


class Launcher:
    """`num_servers` servers on this host: `start`, then `wait`, then `stop`. A context manager that stops on the way out.

    `start` returns at once, so the trainer can build its model while vLLM starts. `port` is that of the first server, the next ones
    follow; 0 picks free ones. `devices` are the ids of the GPUs to share out, `options.tp` to each server; None runs vLLM for CPU. Servers
    listen on the address `host` of this machine alone, and with a `token` answer those alone who send it. Each server logs to
    `log_dir/vllm_N.log`. One that has ended may be started again up to `max_restarts` times (`may_start_again`). Where clients learn from
    `moved` that a server has moved, it restarts at a fresh port when another process has taken its own.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_dir: str | Path,
        *,
        num_servers: int = 1,
        port: int = 0,
        devices: Sequence[str] | None = None,
        startup_timeout: float = 600.0,
        host: str = HOST,
        token: str | None = None,
        max_restarts: int = 0,
        moved: MovedServers | None = None,
    ):
        if devices is not None and len(devices) < num_servers * options.tp:
            raise ValueError(
                f"rollout.servers {num_servers} x rollout.tp {options.tp} need {num_servers * options.tp} GPUs; {len(devices)} were given: "
                "lower one of them"
            )
        self.options, self.log_dir, self.num_servers, self.port = options, Path(log_dir), num_servers, port
        self.devices, self.startup_timeout = devices, startup_timeout
        self.host, self.token = host, token
        self.max_restarts, self._moved = max_restarts, moved
        self.restarts: Counter[str] = Counter()  # address -> how often
        self.servers: list[Server] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        """Addresses of the servers, in order."""
        return [server.url for server in self.servers]

    @property
    def logs(self) -> list[Path]:
        """Log files of the servers, in order."""
        return [server.log for server in self.servers]

    def start(self) -> None:
        """Start all servers without waiting for them. EngineStartError when a port is taken; no server is left then."""
        if Path(self.options.model).is_absolute() and not Path(self.options.model, "config.json").exists():
            raise EngineStartError(f"model.path: {self.options.model} holds no config.json; vLLM needs a Hugging Face folder")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        remove_stale()
        if self._moved is not None:
            self._moved.forget()
        ports = [self.port + i for i in range(self.num_servers)] if self.port else _free_ports(self.host, self.num_servers)
        for port in ports:
            _check_port(self.host, port)
        atexit.register(self.stop)
        self._pid = os.getpid()
        for index, port in enumerate(ports):
            self.servers.append(self._launch(index, port))

    def wait(self, progress: Callable[[str], None] = lambda text: None) -> list[str]:
        """Addresses of the servers once all of them answer. `progress` gets a line every few seconds.

        One that is killed is started again. Raises EngineStartError, with the reason or else the end of the log, when one ends by itself,
        is killed too often or does not answer within `startup_timeout` seconds; all servers are stopped then.
        """
        begun, told = time.monotonic(), 0.0
        waiting = list(range(self.num_servers))
        while waiting:
            now = time.monotonic()
            for place in waiting:
                server = self.servers[place]
                if not server.alive:
                    if not (server.killed and self.may_start_again(server)):
                        self._give_up(server, f"{server.fate} after {now - server.started:.0f} s")
                    progress(f"warning: {self.start_again(place)}")
                    self._rename(place)  # no client knows it yet
                elif now - server.started > self.startup_timeout:
                    self._give_up(server, f"did not answer within {self.startup_timeout:.0f} s (rollout.startup_timeout)")
            waiting = [place for place in waiting if not healthy(self.servers[place].address)]
            if waiting and now - begun - told >= 5:
                told = now - begun
                log = self.servers[waiting[0]].log
                progress(f"waiting for {len(waiting)} vLLM server{'s' * (len(waiting) > 1)}: {told:.0f} s, log {log}")
            time.sleep(0.1 if waiting else 0)
        return self.urls

    def stop(self) -> None:
        """End every server and all its processes: SIGTERM, then SIGKILL. Does nothing a second time, and nothing in a forked child."""
        if self.servers and os.getpid() != self._pid:
            return
        for server in self.servers:
            if server.alive:
                server.supervisor.send_signal(signal.SIGTERM)
        for server in self.servers:
            server.end()
        if self._moved is not None:
            self._moved.forget()
        self.servers.clear()
        atexit.unregister(self.stop)

    def may_start_again(self, server: Server) -> bool:
        """Whether it has been started again fewer than `max_restarts` times."""
        return self.restarts[server.url] < self.max_restarts

    def start_again(self, index: int) -> str:
        """Start a server that has ended, with its log going on, without waiting for it; the line to log. It gets the port of its URL, or a
        fresh one when another process listens there."""
        server = self.servers[index]
        assert not server.alive and self.may_start_again(server)
        self.restarts[server.url] += 1
        port, where = int(server.url.rpartition(":")[2]), ""
        if self._moved is not None and not is_free(self.host, port):
            (fresh,) = _free_ports(self.host, 1)
            port, where = fresh, f", and another process took its port (new port {fresh})"
        self.servers[index] = self._launch(index, port, how="ab", url=server.url)
        if self._moved is not None:
            self._moved.write({each.url: each.address for each in self.servers if each.address != each.url})
        return (
            f"vLLM server {server.url} {server.fate}{where}; starting it again, {self.restarts[server.url]} of {self.max_restarts} times "
            f"(rollout.max_restarts); its log: {server.log}"
        )

    def _rename(self, index: int) -> None:
        """Have the server's name be its present address."""
        server = self.servers[index]
        self.restarts[server.address] = self.restarts.pop(server.url)
        server.url = server.address

    def _launch(self, index: int, port: int, how: str = "wb", url: str | None = None) -> Server:
        log = self.log_dir / f"vllm_{index}.log"
        supervise = [sys.executable, "-I", "-S", str(HERE / "supervisor.py"), str(os.getpid()), str(GRACE_SECONDS)]
        with log.open(how) as out:
            supervisor = subprocess.Popen(
                supervise + self._command(port),
                env=self._environment(index),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with contextlib.suppress(BrokenPipeError), supervisor.stdin as pipe:  # it may have ended already, which `wait` reports
            pipe.write((self.token or "").encode())
        address = f"http://{self.host}:{port}"
        return Server(url or address, log, supervisor, time.monotonic(), address)

    def _command(self, port: int) -> list[str]:
        o = self.options
        program = ["-m", "vllm.entrypoints.openai.api_server"] if self.devices is not None else [f"{HERE.parent}/vllm_plugin/vllm_main.py"]
        flags = {
            "--model": o.model,
            "--served-model-name": "policy",
            "--host": self.host,
            "--port": port,
            "--dtype": o.dtype,
            "--max-model-len": o.max_model_len,
            "--max-num-seqs": o.max_num_seqs,
            "--tensor-parallel-size": o.tp,
            "--logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from, temperature included
            "--uvicorn-log-level": "warning",
            "--worker-extension-cls": "megagrpo.vllm_plugin.worker_verbs.WorkerVerbs",
        }
        if o.quantization is not None:
            flags["--quantization"] = o.quantization
        if o.lora_rank:
            flags |= {"--max-loras": 1, "--max-cpu-loras": 1, "--max-lora-rank": next(rank for rank in LORA_RANKS if rank >= o.lora_rank)}
        else:
            flags["--weight-transfer-config"] = json.dumps({"backend": "megagrpo"})
        switches = ["--enable-scale-out", "--no-enable-log-requests"]
        if o.tool_parser is None:
            switches.append("--skip-tokenizer-init")
        else:
            flags |= {"--tool-call-parser": o.tool_parser, "--tokenizer": o.tokenizer or o.model}
            switches.append("--enable-auto-tool-choice")
        switches += ["--enable-lora"] * bool(o.lora_rank) + ["--enable-sleep-mode"] * o.sleep_mode
        switches += ["--enable-expert-parallel"] * o.expert_parallel
        if self.devices is not None:
            flags["--gpu-memory-utilization"] = o.gpu_memory_utilization
        else:
            # A prompt that is split over two batches rewinds its seeded generator, which torch cannot do on a CPU: the engine dies.
            switches.append("--no-enable-chunked-prefill")
            flags["--block-size"] = 32  # the responses to a prompt share its full blocks; vLLM's 128 here exceeds most short prompts
            flags["--max-num-batched-tokens"] = max(o.max_model_len, MAX_BATCHED_TOKENS)
        if self.token is not None:
            flags["--middleware"] = GUARD
        if o.enforce_eager or self.devices is None:  # compiling on CPU takes longer than it saves
            switches.append("--enforce-eager")
        return [sys.executable, *program, *(str(word) for flag in flags.items() for word in flag), *switches, *o.extra_args]

    def _environment(self, index: int) -> dict[str, str]:
        # What a launcher such as torchrun tells its ranks must not reach vLLM, which forms groups of its own.
        ours = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            TOKEN_VARIABLE,
            FILE_VARIABLE,
        )
        env = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith("TORCHELASTIC_")}
        env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
        env["VLLM_PLUGINS"] = "megagrpo"
        env["VLLM_PROCESS_NAME_PREFIX"] = "megagrpo-vllm"  # `ps | grep megagrpo` then shows EngineCore and workers too
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the workers of a server are on one host
        if self.host == HOST:
            env["NCCL_SOCKET_IFNAME"] = "lo"  # so are all ranks that send them weights
        if self.token is not None:
            env[FILE_VARIABLE] = "/dev/stdin"  # a pipe, empty once it is read; every process of this user may read an environment
        if self.options.lora_rank:
            env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling vLLM's sources doubles the time of every start
        if self.devices is not None:
            if self.options.deterministic:
                env["VLLM_BATCH_INVARIANT"] = "1"
            first = index * self.options.tp
            return env | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[first : first + self.options.tp])}
        workers = self.num_servers * self.options.tp
        threads = self.options.omp_threads or max(1, len(os.sched_getaffinity(0)) // workers)
        # A sync gives every weight new memory, which the kernel would hand out in pages of 4 KiB: that takes longer than the copy itself.
        env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        return env | {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.options.kv_cache_gb)),  # vLLM reads whole GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding fails for tp > 1 on one NUMA node, and fights the trainer for cores
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads cost the trainer beside them a factor of ten
            "GOMP_SPINCOUNT": "0",
            "TORCH_COMPILE_DISABLE": "1",  # the sampler would run a C++ compiler in the first request
        }

    def _give_up(self, server: Server, what: str) -> None:
        cause, tail = server.cause(), server.log_tail()
        self.stop()
        reason = f": {cause}. Its log: {server.log}" if cause else f". The end of its log {server.log}:\n{tail}"
        raise EngineStartError(f"vLLM server {server.url} {what}{reason}")


def healthy(url: str) -> bool:
    """Whether the server at `url` says that it is well."""
    try:
        return httpx.get(f"{url}/health", timeout=5, verify=CERTIFICATES).status_code == 200
    except httpx.HTTPError:
        return False


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that nothing listens on now. The kernel gives connections of other programs ports from 32768 on, so none of them takes one of
    these before the server listens. EngineStartError where there are fewer than `count`, or where this machine does not have the address.
    """
    tried = random.SystemRandom().sample(PORTS, len(PORTS))
    ports = list(itertools.islice((port for port in tried if is_free(host, port)), count))
    if len(ports) < count:
        raise EngineStartError(f"rollout.port: {count} free ports needed on {host}, {len(ports)} found ({_bind_error(host, tried[0])})")
    return ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    return _bind_error(host, port) is None


def _check_port(host: str, port: int) -> None:
    if error := _bind_error(host, port):
        raise EngineStartError(
            f"rollout.port: {port} cannot be used on {host} ({error.strerror}); name another, or 0 to pick a free one"
        ) from error


def _bind_error(host: str, port: int) -> OSError | None:
    """Why nothing can listen at this address now; None when a server could."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            return error
    return None
