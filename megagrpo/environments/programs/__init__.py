"""Agents that are programs: their options, work folders and processes."""
