"""This process and machine: temporary files, the parent's death, terminal text. Imports only the standard library."""
