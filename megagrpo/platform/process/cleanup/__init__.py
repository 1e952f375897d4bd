"""Files, shared memory and child processes that must not outlive a process."""
