"""What text encoders gave, kept and given again to those who asked for it."""
