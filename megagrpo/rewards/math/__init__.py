"""Which answers are equal: notation, units, intervals, expressions."""
