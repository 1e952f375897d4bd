"""Rules that need the model's config.json, a file or the number of ranks."""
