"""The Python API. `megagrpo/__init__.py` exports it; torch and vLLM run in child processes only."""
