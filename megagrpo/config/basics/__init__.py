"""YAML text, paths and problems: the base of the sections and rules."""
