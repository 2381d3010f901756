"""Jobs that share each pass of the ring."""
