"""This process and the machine: temporary files, the parent's death, text on the terminal. Imports the standard library
only."""
