"""What runs inside vLLM's processes. The only room that imports vLLM."""
