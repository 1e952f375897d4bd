"""Weight sync: one weight from a Megatron shard (`trainer_side/`) over `wire/` into a vLLM parameter (`vllm_side/`)."""
