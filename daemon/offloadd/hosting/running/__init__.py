"""One call of a pipeline: its arguments, its own state, its turns, its outputs."""
