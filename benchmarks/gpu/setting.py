"""The setting of benchmarks on a GPU: models of known shapes, the base config of their runs, the chip and its versions.

    python -m benchmarks.gpu.setting

prints the chip's measured ceilings beside its data sheet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.config import RunConfig, load_config
from megagrpo.planner.costs.gpu_specs import GPUS, Gpu

if TYPE_CHECKING:  # imports torch, which a dry run does not need
    from benchmarks.gpu.common import Ceilings

ROOT = Path(__file__).resolve().parents[2]
BASE = Path(__file__).with_name("run.yaml")
PACKAGES = ("torch", "transformer-engine", "megatron-core", "vllm", "triton")
QWEN25 = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    vocab_size=151936,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    hidden_act="silu",
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
TINY = "tiny"  # for testing a script
SMALL = {  # config.json of Qwen2.5-0.5B and -1.5B; the larger ones are in configs/models
    "0.5b": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2
    ),
    "1.5b": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2
    ),
}
TINY_SIZES = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
TINY_SIZES |= dict(vocab_size=2048)
LARGE = {"7b": "Qwen2.5-7B-Instruct", "30b-a3b": "Qwen3-30B-A3B"}


def shape(name: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a model of SMALL or LARGE, or of TINY, with `layers` layers."""
    if name in LARGE:
        raw = json.loads((ROOT / "configs" / "models" / "Qwen" / LARGE[name] / "config.json").read_text())
    else:
        raw = QWEN25 | (SMALL | {TINY: TINY_SIZES})[name]
    return raw | ({"num_hidden_layers": layers} if layers else {})


def write_shape(raw: dict[str, Any], folder: Path) -> Path:
    """A folder with a model's config and no weights, as the plan and vLLM's dummy weights need it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    return folder


def run_config(model: Path | str, *overrides: str) -> RunConfig:
    """benchmarks/gpu/run.yaml for a model, with dotted overrides."""
    return load_config(BASE, [f"model.path={model}", *overrides])


# ------------------------------------------------------------------------------------------------------------- the chip


def wait() -> None:
    """Wait until the device has finished its work."""
    import torch

    from megagrpo.platform import device

    if device.has_gpu():
        torch.cuda.synchronize()


def data_sheet(asked: str | None = None) -> Gpu | None:
    """The row of `megagrpo plan --gpu` for `asked`, else for this machine's GPU; None without a known GPU."""
    if asked is not None:
        return GPUS[asked]
    import torch

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    return next((gpu for key, gpu in GPUS.items() if key in name), None)


def header() -> str:
    """The chip, the versions and the date."""
    import torch

    what = "no GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        what = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {_driver()}, CUDA {torch.version.cuda}"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    commit = _said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    return f"{what} | {versions} | commit {commit} | {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def version(package: str) -> str:
    """The version of an installed package, or of vLLM's CPU build; "none" without either."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def _driver() -> str:
    said = _said("nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader").split("\n")[0]
    return f"driver {said}" if said else "driver unknown"


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ----------------------------------------------------------------------------------------------------------- the output


class Table:
    """Aligned rows, printed at once. Columns are name -> format, as in "10.1f"; None is printed as a dash."""

    def __init__(self, **columns: str):
        self.formats = list(columns.values())
        self.widths = [int("".join(c for c in form.partition(".")[0] if c.isdigit())) for form in self.formats]
        names = [name.replace("__", "/").replace("_", " ") for name in columns]
        self._line(f"{name:{'<' if form.startswith('<') else '>'}{width}}" for name, form, width in self._with(names))

    def _with(self, cells: Sequence[Any]) -> Any:
        return zip(cells, self.formats, self.widths, strict=True)

    def row(self, *values: Any) -> None:
        self._line(
            f"{'-':>{width}}" if value is None else format(value, form) for value, form, width in self._with(values)
        )

    def _line(self, cells: Any) -> None:
        print(" ".join(cells).rstrip(), flush=True)


def parser(text: str) -> argparse.ArgumentParser:
    """A parser with the common options of all benchmarks: a dry run on paper, and keys of the run."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dry-run", action="store_true", help="say what would be run, and how large it is; needs no GPU")
    made.add_argument(
        "--gpu", choices=GPUS, help="whose data sheet to compare with; by its name, and h200 in a dry run"
    )
    made.usage = "%(prog)s [options] [key=value ...]    (keys of the run's config, over benchmarks/gpu/run.yaml)"
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with `overrides`: words like key=value, at any position."""
    words = sys.argv[1:] if arguments is None else arguments
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    args = made.parse_args([word for word in words if word not in overrides])
    args.overrides = overrides
    return args


def begin(args: argparse.Namespace) -> tuple[Gpu | None, Ceilings | None]:
    """Print the model, chip and versions, and return the data sheet and the measured ceilings; a dry run measures
    nothing."""
    if args.dry_run:
        gpu = GPUS[args.gpu or "h200"]
        print(f"dry run: nothing is measured | {gpu.name} by its data sheet: {sheet_text(gpu)}")
        return gpu, None
    from megagrpo.platform.device import quiet

    quiet()
    print(header(), flush=True)
    gpu, ceilings = data_sheet(args.gpu), measured_ceilings()
    print(
        f"{ceilings or 'nothing measured without a GPU'} | data sheet: {sheet_text(gpu) if gpu else 'unknown'}",
        flush=True,
    )
    return gpu, ceilings


def measured_ceilings() -> Ceilings | None:
    """Measure the ceilings of this machine's GPU; None without a GPU."""
    from benchmarks.gpu.common import measure_ceilings
    from megagrpo.platform import device

    if not device.has_gpu():
        return None
    device.select_local_device()
    found = measure_ceilings()
    device.release_memory()
    return found


def sheet_text(gpu: Gpu) -> str:
    return (
        f"bf16 {gpu.bf16_tflops:g}, FP8 {gpu.fp8_tflops:g} TFLOP/s, {gpu.memory_gib:g} GiB at {gpu.memory_gb_per_s:g} "
        "GB/s"
    )


if __name__ == "__main__":
    begin(parse(parser(__doc__), None))
