"""Code that runs inside vLLM's processes. This is the only package that imports vLLM."""
