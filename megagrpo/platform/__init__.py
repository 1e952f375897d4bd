"""Processes, devices, parallel ranks and the installer."""
