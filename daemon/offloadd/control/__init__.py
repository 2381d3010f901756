"""Control plane: sockets, sessions, queue and worker supervision; imports no torch."""
