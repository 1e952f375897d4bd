"""Patches of vLLM for CPU."""
