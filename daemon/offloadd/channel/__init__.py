"""The border between control plane and worker: their messages and the socket pair they share."""
