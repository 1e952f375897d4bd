"""The client of vLLM's servers: how they are asked, how they take new weights, how they fail."""
