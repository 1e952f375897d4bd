"""The arguments of API calls, and how they reach another process."""
