"""Rows of data sets, and their order."""
