"""Routers and experts."""
