"""Products with quantised weights: one description of a matrix's format, one kernel family per device."""
