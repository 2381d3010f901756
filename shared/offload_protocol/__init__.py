"""What client and daemon must agree on: messages, codec, error codes, endpoints."""
