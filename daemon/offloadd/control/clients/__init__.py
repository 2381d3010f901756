"""Who is connected: entrances, identities and roles, sessions, and what is on its way to each."""
