"""Jobs from their admission to their tombstone."""
