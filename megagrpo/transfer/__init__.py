"""What both ends of a weight sync know: slices, plan, messages, formats and checksums."""
