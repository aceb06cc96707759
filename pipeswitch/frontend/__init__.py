"""Part of the server that talks to clients: converts bytes to events, and answers to bytes."""
