"""Installs what a wheel cannot require: this machine's build of vLLM and compiled extensions. Needs only Python."""
