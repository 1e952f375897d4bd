"""The vLLM servers that this project starts: launcher, supervisor, restarts and hang detection."""
