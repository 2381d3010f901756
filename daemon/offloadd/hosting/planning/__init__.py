"""What hosting a model would take, asked before it is loaded."""
