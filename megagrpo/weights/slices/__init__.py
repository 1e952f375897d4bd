"""Slices of Hugging Face tensors and the plan that moves them. Imports neither megatron nor vLLM."""
