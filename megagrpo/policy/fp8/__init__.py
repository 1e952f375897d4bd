"""FP8 linears and FP8 weights of the policy: rounding, scales, and their checkpoint state."""
