"""Memory of converting a model of the size of Qwen3-30B-A3B: there and back under a limit of 2 GB + the largest tensor.

    python benchmarks/conversion_memory.py FOLDER             # 9 of its 48 layers: 12.5 GB, and twice that on the disk
    at a time
    python benchmarks/conversion_memory.py FOLDER --layers 2  # the same peak with a quarter of the bytes

Writes a random sharded checkpoint, converts it there and back, compares the sha256 of every file, and prints seconds
and peak memory of each conversion. The limit is RLIMIT_DATA, which the kernel enforces on all private memory of a
process, touched or not. The peak is the resident memory, including pages of mapped files. The script removes its files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megagrpo.config import ParallelSection
from megagrpo.families.hf_config import parse_hf_config
from megagrpo.platform.parallel.layout import init_layout
from megagrpo.weights.bridge.hf_files import Writer, new_files
from megagrpo.weights.bridge.megatron_io import structure

QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    dtype="bfloat16",
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=151936,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=40960,
)
ALLOWED = 2 * 10**9  # bytes, in addition to the largest tensor


def make_model(folder: Path, layers: int) -> int:
    """Write it in files of 2 GB, with every tensor a slice of the same random numbers; return the bytes of its largest
    tensor."""
    folder.mkdir(parents=True)
    config = QWEN3_30B_A3B | dict(num_hidden_layers=layers)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    layout = init_layout(ParallelSection())
    found = {
        block.name: block.shape for part in structure(parse_hf_config(config), layout).parts for block in part.blocks
    }
    layout.close()
    files = new_files({name: (torch.bfloat16, shape) for name, shape in found.items()}, limit=2 * 10**9)
    largest = max(entry.nbytes for entry in files.entries.values())
    pool = torch.randn(largest // 2 + 17 * len(found), dtype=torch.float32).to(torch.bfloat16)
    with Writer(folder, files) as writer:
        for i, (name, shape) in enumerate(found.items()):
            count = torch.Size(shape).numel()
            writer.write(name, pool[17 * i : 17 * i + count].view(shape))
    return largest


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def run_command(name: str, *arguments: Path, limit: int) -> tuple[float, float]:
    """Seconds and peak resident memory (GB) of a command of megagrpo under the limit. RuntimeError when it fails."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "megagrpo", name, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": sys.path[0]},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name} ended with status {status}")
    return time.monotonic() - start, usage.ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty or new folder")
    parser.add_argument("--layers", type=int, default=9)
    args = parser.parse_args()
    source, megatron, back = (args.folder / name for name in ("model", "megatron", "back"))
    try:
        largest = make_model(source, args.layers)
        before = digests(source)
        limit, total = ALLOWED + largest, sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"{total / 1e9:.2f} GB, {total / 2e9:.2f} B parameters in {len(before) - 2} files")
        print(f"limit {limit / 1e9:.2f} GB: 2 GB + the largest tensor of {largest / 1e9:.2f} GB", flush=True)
        there = run_command("convert", source, megatron, limit=limit)
        shutil.rmtree(source)
        again = run_command("export", megatron, back, limit=limit)
        shutil.rmtree(megatron)
        for name, (seconds, peak) in (("convert", there), ("export", again)):
            print(f"{name}: {seconds:.0f} s, {total / seconds / 1e6:.0f} MB/s, peak {peak:.2f} GB")
        equal = digests(back) == before
        print("every file is equal, the index included" if equal else "the files differ")
        return int(not equal)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
