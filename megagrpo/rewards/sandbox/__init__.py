"""A process that the kernel confines, for the programs of completions. Importing this package imports nothing else."""
