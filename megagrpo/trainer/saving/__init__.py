"""What ends or resumes a run: checkpoints, signals, time limits and the run's folder."""
