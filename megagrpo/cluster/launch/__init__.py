"""Starts the ranks and servers of a run: on this machine, under Slurm, on Kubernetes."""
