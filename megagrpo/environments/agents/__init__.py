"""Agents of one's own: a function that talks to an OpenAI-compatible address, and is trained on what it sampled."""
