"""One module per section of a config, and the tables that its keys name."""
