"""Jobs on machines and clusters: launchers, Slurm, and the doctor that checks a machine."""
