"""Vision towers and the rows of their images."""
