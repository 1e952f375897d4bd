"""The layer specs and the transformer's config."""
