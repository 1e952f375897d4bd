"""The mathematics of GRPO as pure functions of tensors: no distributed code, no Megatron."""
