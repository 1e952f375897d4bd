"""Products and weights of the policy in FP8: numbers, scales, and their part of a checkpoint."""
