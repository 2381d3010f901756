"""Weights that cannot be used as they lie, written once by a process of its own."""
