"""How the built-in model `shapes` was made: its words, its pictures, its networks, its training."""
