"""Starts the ranks and servers of a run: on this machine, under Slurm, in a pod of Kubernetes."""
