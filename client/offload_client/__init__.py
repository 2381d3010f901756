"""The Python client of offloadd; imports no torch."""
