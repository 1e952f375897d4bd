"""The optimizer, a user's own one, and its saved state."""
