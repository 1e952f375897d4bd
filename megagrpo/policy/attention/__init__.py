"""Core attention in plain torch, for machines without Transformer Engine: packed, context-parallel and latent."""
