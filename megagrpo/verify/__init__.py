"""Verifies a parallel layout: one step of a shrunken copy of a run must compute what one process computes, every gradient tensor
included.

`shrink` makes the copy, `step` runs it in a layout, `compare` measures the distance of two outcomes. `megagrpo verify` is in
`commands/verify.py`.
"""
