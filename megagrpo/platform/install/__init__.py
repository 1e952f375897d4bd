"""Installs what a wheel of megagrpo cannot require: the build of vLLM for this machine, and compiled extensions. Needs
only Python."""
