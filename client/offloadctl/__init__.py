"""The command line of offloadd, built on the client."""
