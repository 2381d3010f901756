"""Who has the next turn, and what it costs to change."""
