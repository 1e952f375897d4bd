"""Special layers of single families."""
