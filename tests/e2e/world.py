"""A world small enough for whole runs in seconds: a random Llama of 0.4 M weights with a byte tokenizer, questions,
reward functions, a config, and one vLLM server that all runs share. Each test process makes it once and removes it at
its end.

Runs start through `launch/local.sh` (`start`), or in a fork of pytest's process (`train`), where all modules are
imported."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks

from megagrpo.__main__ import main
from megagrpo.engine.servers.launcher import Launcher
from megagrpo.engine.servers.options import ServerOptions
from megagrpo.records.checkpoints.run_files import checkpoints

# Modules that a run imports, imported once for all forks.
OF_RUNS = (
    "megagrpo.trainer.wiring",
    "megagrpo.data.sources.data_sources",
    "torch.utils.tensorboard",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
)
REPOSITORY = Path(__file__).parents[2]
SECONDS = 200.0  # limit for one part of a run on a busy machine
AFTER_THE_END = 60.0  # seconds that a test waits for what an ended run leaves
HEADS = 4
# beginnings of names of metrics that differ from run to run
MEASURED = (
    *("time/", "idle/", "weight_sync/", "tokens_per_second", "generated_tokens_per_second", "memory", "wall_time"),
    *("multi_turn/turn_seconds", "multi_turn/tool_seconds", "eval/idle/", "eval/multi_turn/turn_seconds"),
    "eval/multi_turn/tool_seconds",
)

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt "
    "%}<|start|>{{ opening }}"
    "{% endif %}"
)

REWARDS = '''
"""Reward functions of the tests."""

import os
import time


def low_bytes(completions, answer, **columns):
    """Share of characters below "a": any model gives it a spread, and can raise it."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(character < "a" for character in text) / max(1, len(text)) for text in texts]


def seldom(completions, answer, **columns):
    """1 for about one in four completions: some groups agree, others do not."""
    return [float(share > 0.5) for share in low_bytes(completions, answer)]


def never(completions, **columns):
    return [0.0 for _ in completions]


def raises(completions, **columns):
    raise RuntimeError("no reward today")


def raises_on_odd_lengths(completions, **columns):
    if any(len(c[0]["content"] if isinstance(c, list) else c) % 2 for c in completions):
        raise RuntimeError("no reward today")
    return [0.0 for _ in completions]


def hangs(completions, **columns):
    time.sleep(600)


def wants_proof(completions, proof):
    return [0.0 for _ in completions]


def slow(completions, seconds, started, **columns):
    open(started, "w").close()
    time.sleep(seconds)
    return low_bytes(completions, None)
'''

CONFIG = """
run: {{name: run, max_steps: 2, log_completions_steps: 0, trackers: []}}
model: {{path: {model}, precision: fp32}}
rollout:
  prompts_per_step: 4
  num_generations: 4
  max_prompt_length: 48
  max_completion_length: 12
  max_num_seqs: 64
  kv_cache_gb: 1
data: {{train: {{source: {folder}/train.jsonl}}}}
rewards:
  workers: 1
  functions: [{{function: {folder}/rewards.py:low_bytes}}]
train: {{learning_rate: 1e-3, adam_epsilon: 1e-6, max_tokens_per_micro_batch: 256}}
"""


@functools.cache
def folder() -> Path:
    """The folder with model/, train.jsonl, eval.jsonl, rewards.py and config.yaml; server/ and plain/ are added
    later."""
    for module in OF_RUNS:
        importlib.import_module(module)
    made = Path(tempfile.mkdtemp(prefix="megagrpo_world_"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    run_ranks(_make_model, 1, made / "model")
    numbers = random.Random(0)
    for name, count in (("train", 24), ("eval", 4)):
        pairs = [(numbers.randint(1, 99), numbers.randint(1, 99)) for _ in range(count)]
        rows = [json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) for a, b in pairs]
        (made / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (made / "rewards.py").write_text(REWARDS)
    (made / "config.yaml").write_text(CONFIG.format(model=made / "model", folder=made))
    return made


def _make_model(path: Path) -> None:
    """A random Llama and a tokenizer of bytes with a chat template, as Hugging Face saves them."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bare = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    bare.add_special_tokens(["<|start|>", "<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def open_thoughts(folder: Path) -> list[str]:
    """Options of runs on a model in `folder` whose prompts open a thought: two of its tokens become <think> and
    </think>. The policy's own thoughts are as random as its answers."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = {i: text for text, i in tokenizer["model"]["vocab"].items()}
    vocabulary |= {254: "<think>", 255: "</think>"}
    tokenizer["model"]["vocab"] = {text: i for i, text in vocabulary.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": i, "content": vocabulary[i]} | flags for i in (254, 255)]
    file.write_text(json.dumps(tokenizer))
    template = folder / "opens.jinja"
    template.write_text(TEMPLATE.replace("{{ opening }}", "<think>"))
    return [f"model.path={folder}", f"data.chat_template={template}", "rollout.max_thinking_tokens=3"]


@functools.cache
def server() -> str:
    """The address of a vLLM server on the world's model."""
    options = ServerOptions(
        str(folder() / "model"), "float32", 64, max_num_seqs=64, kv_cache_gb=1, omp_threads=1, finds_text=True
    )
    launcher = Launcher(options, folder() / "server")
    launcher.start()
    return launcher.wait()[0]


@dataclass(frozen=True)
class Run:
    """A run that has ended: its exit code, its output, and its folder."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; empty when the run ended before the first."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that belong to steps."""
        return [line for line in self.lines if "reward" in line]

    @property
    def completions(self) -> list[dict[str, Any]]:
        """All lines of completions.jsonl."""
        return [json.loads(line) for line in (self.folder / "completions.jsonl").read_text().splitlines()]

    @property
    def saved(self) -> list[str]:
        """All entries of the checkpoint folder, by name."""
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*"))

    @property
    def newest(self) -> Path:
        """The newest complete checkpoint."""
        return checkpoints(self.folder / "checkpoints")[-1]


def arguments(output: Path, *overrides: str, launched: bool = False) -> list[str]:
    """The command line of a run into `output`/run; it uses the shared server unless it launches its own."""
    servers = [] if launched else [f"rollout.urls=[{server()}]"]
    return [str(folder() / "config.yaml"), f"run.output_dir={output}", *servers, *overrides]


@dataclass(frozen=True)
class Forked:
    """A run like `megagrpo train` on one rank, in a fork that leads its own process group."""

    pid: int
    output: Path
    printed: Path

    def out(self) -> str:
        """The output so far."""
        return (self.printed / "out").read_text()

    def err(self) -> str:
        """The errors so far."""
        file = self.printed / "err"
        return file.read_text() if file.exists() else ""

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float = SECONDS) -> Run:
        """Wait for the run to end and return it; AssertionError after `seconds`."""
        done = wait_for(
            lambda: os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "end of the run", seconds
        )
        code = done.si_status if done.si_code == os.CLD_EXITED else -done.si_status
        return Run(code, self.out(), self.err(), self.output / "run")


_running: list[Forked] = []


@contextlib.contextmanager
def running(
    output: Path, *overrides: str, prepare: Callable[[], None] = lambda: None, launched: bool = False
) -> Iterator[Forked]:
    """Start a run into `output`/run, and kill it on exit if it is still alive. The fork calls `prepare` first."""
    words = ["train", *arguments(output, *overrides, launched=launched)]
    with tempfile.TemporaryDirectory() as printed:
        Path(printed, "out").touch()
        pid = _fork(words, Path(printed), prepare)
        run = Forked(pid, output, Path(printed))
        _running.append(run)
        try:
            yield run
        except AssertionError as error:
            error.add_note(f"the run wrote:\n{run.out()}\n{run.err()}")
            raise
        finally:
            _running.remove(run)
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def train(output: Path, *overrides: str, prepare: Callable[[], None] = lambda: None, launched: bool = False) -> Run:
    """A run into `output`/run from start to end."""
    with running(output, *overrides, prepare=prepare, launched=launched) as run:
        return run.wait()


@functools.cache
def plain() -> Run:
    """The run with the default config: two steps of one rank. Tests must not change its folder."""
    run = train(folder() / "plain")
    assert run.code == 0, run.err
    return run


def start(
    output: Path, *overrides: str, launched: bool = False, within: Sequence[str] = (), **environment: str
) -> subprocess.Popen:
    """`launch/local.sh` in its own process group, as the last words of the command `within`."""
    command = [*within, REPOSITORY / "launch" / "local.sh", *arguments(output, *overrides, launched=launched)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen, output: Path, seconds: float = SECONDS) -> Run:
    """Wait for a started run and return it; one that takes longer than `seconds` is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not done after {seconds} s\n{out}\n{err}") from None
    return Run(process.returncode, out, err, output / "run")


def wait_for(happened: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Wait until `happened` returns a true value, and return it; AssertionError naming `what` after `seconds`, or a
    minute after a run has ended."""
    deadline = time.monotonic() + seconds
    while not (result := happened()):
        if any(run.has_ended() for run in _running):
            deadline = min(deadline, time.monotonic() + AFTER_THE_END)
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.02)
    return result


def steps_done(output: Path) -> int:
    """Lines of steps that a run has written so far."""
    file = output / "run" / "metrics.jsonl"
    return file.read_text().count('"reward":') if file.exists() else 0


def family(pid: int) -> list[int]:
    """`pid` and all living processes below it."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_memory(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped, and the folder that holds the weights."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/maps").read_text().split()
            found |= {Path(word) for word in words if word.startswith("/dev/shm/") and Path(word).exists()}
    return found | {file.parent for file in found if file.parent != Path("/dev/shm")}


def weights_in_shared_memory(pid: int) -> list[Path]:
    """Folders through which the trainer `pid` sends weights."""
    return list(Path("/dev/shm").glob(f"megagrpo-{pid}.*"))


def audit(*words: Any) -> tuple[int, str]:
    """Exit code and output of `megagrpo audit` with these arguments."""
    return run_ranks(_audit, 1, ["audit", *map(str, words)])[0]


def _audit(words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    return code, said.getvalue()


def command(*words: Any, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of `megagrpo` with these arguments."""
    return run_ranks(_command, 1, [*map(str, words)], stdin)[0]


def _command(words: list[str], stdin: str) -> tuple[int, str, str]:
    out, err, sys.stdin = io.StringIO(), io.StringIO(), io.StringIO(stdin)
    torch.distributed.destroy_process_group()  # a command has no process group
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    left = [pid for pid in family(os.getpid()) if pid != os.getpid() and alive(pid)]
    assert not left, f"processes left behind: {left}"
    return code, out.getvalue(), err.getvalue()


def plain_tensors(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, weights and optimizer, by name."""
    return run_ranks(_plain_tensors, 1, checkpoint)[0]


def _plain_tensors(checkpoint: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {name: value.clone() for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def _fork(words: list[str], printed: Path, prepare: Callable[[], None]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # torch keeps two idle helper threads from its import; no run needs them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(printed / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        logging.getLogger().handlers.clear()  # pytest's
        prepare()
        code = main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)  # skips destructors: they belong to the pytest parent
