"""Methods beside GRPO, which learn from the responses of rows."""
