"""The name under which installed packages tell vLLM of its plug-in; a server whose package was installed earlier loads it by this name."""

from megagrpo.vllm_plugin.engine import register as register
