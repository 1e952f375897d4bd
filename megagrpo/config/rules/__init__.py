"""Rules across sections. Each returns the problems of a whole config."""
