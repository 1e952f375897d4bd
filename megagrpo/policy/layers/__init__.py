"""Small layers and functions that several blocks use."""
