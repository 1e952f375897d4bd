"""Jobs on machines and clusters: launchers, Slurm, Kubernetes, and the doctor that checks a machine."""
