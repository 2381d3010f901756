"""Weights that a library quantised: which these are, and what they look like without values."""
