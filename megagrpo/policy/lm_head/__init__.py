"""The vocabulary-sharded LM head: log-probs, entropy, exact KL and truncation, chunked in torch or fused in Triton."""
