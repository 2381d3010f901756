"""What moves together: a module cut into groups, and what never leaves the device."""
