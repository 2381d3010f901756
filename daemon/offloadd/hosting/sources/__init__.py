"""What a model is, found out from its files before anything of it is loaded."""
