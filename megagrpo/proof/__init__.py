"""What can be known before a run (`plan/`), compared without it (`verify/`), and recomputed after it (`audit/`)."""
