"""Names of the environment variables that a launcher or a user sets for the processes of a run."""

TOKEN_VARIABLE = "MEGAGRPO_TOKEN"  # the token of the servers and, on several nodes, of the ranks
TOKEN_FILE_VARIABLE = "MEGAGRPO_TOKEN_FILE"  # the file that holds the token
RENDEZVOUS_VARIABLE = "MEGAGRPO_RENDEZVOUS"  # the folder in which the ranks of one node meet; megagrpo/launch/rendezvous.py makes it
NODE_INDICES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")  # hold the index of this node in a Slurm step, or in a job of Kubernetes
