"""Machines, ranks, processes and jobs."""
