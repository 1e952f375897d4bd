"""The client of vLLM servers: requests, weight updates, health checks and failure handling."""
