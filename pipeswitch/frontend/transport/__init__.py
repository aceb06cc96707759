"""Clients' connections: from bytes to messages and back."""
