"""Commands on weights and checkpoints."""
