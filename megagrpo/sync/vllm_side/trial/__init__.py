"""Runs the checks of vLLM's requests in a process of its own, without a server."""
