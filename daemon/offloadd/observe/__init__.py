"""What the daemon shows of itself to those who run it."""
