"""A process that the kernel confines, for programs of completions. Importing this package imports nothing else."""
