"""Public name of the vLLM plug-in: the entry point of installed packages, including those installed before the module moved."""

from megagrpo.vllm_plugin.engine import register as register
