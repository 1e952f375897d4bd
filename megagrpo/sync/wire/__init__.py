"""Code that both ends of a weight sync share: slices, plan, messages, formats and checksums."""
