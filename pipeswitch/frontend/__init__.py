"""The clients' side of the server: bytes to events, answers to bytes."""
