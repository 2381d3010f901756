"""The daemon that owns the device and shares it between programs."""
