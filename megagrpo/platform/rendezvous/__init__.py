"""The rendezvous of processes that are not ranks of one job."""
