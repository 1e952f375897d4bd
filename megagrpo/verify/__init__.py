"""Proves a parallel layout: one step of a shrunken copy of a run computes what one process computes, every gradient tensor included.

`shrink` makes the copy, `step` runs it in a layout, `compare` says how far two outcomes are apart. `megagrpo verify` is in
`commands/verify.py`.
"""
