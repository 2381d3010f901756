"""Device plane: the process that owns one device and runs jobs on it."""
