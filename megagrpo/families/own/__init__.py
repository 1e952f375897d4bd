"""Families with rules or readers of their own, in one short file each or with their relatives."""
