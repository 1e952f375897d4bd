"""Verifies a parallel layout: a shrunken run's step must compute what one process does, every gradient tensor included.

`layouts` goes through the layouts of `megagrpo verify`: `shrink` makes the copy, `step` runs it in a layout, `compare`
measures the distance of two outcomes.
"""
