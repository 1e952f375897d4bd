"""What a run leaves behind: metrics, console lines, dumped steps, checkpoints, and the lock on its folder."""
