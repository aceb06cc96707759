"""Clients' side of the server: converts bytes to events, and answers to bytes."""
