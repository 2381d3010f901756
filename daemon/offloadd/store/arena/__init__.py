"""The host arena, seen from a worker: extents in memory that outlives it."""
