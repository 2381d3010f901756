"""The journal: what was accepted, on disk, so that no death of a process loses it."""
