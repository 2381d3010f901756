"""From a model name to a runnable pipeline."""
