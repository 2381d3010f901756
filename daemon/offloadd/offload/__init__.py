"""The offload engine: groups, plan, executor and accelerators."""
