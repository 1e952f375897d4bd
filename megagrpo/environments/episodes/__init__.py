"""Episodes of environments, and the processes that hold them."""
