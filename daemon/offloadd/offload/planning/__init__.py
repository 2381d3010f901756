"""What stays on the device and how large the ring is, from what was measured."""
