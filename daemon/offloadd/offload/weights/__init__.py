"""Weights in their modules: bound, absent, cast, and in the form that a layer wants."""
