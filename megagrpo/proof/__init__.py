"""A run compared without it (`verify/`), recomputed after it (`audit/`), and shown on one page (`report/`)."""
