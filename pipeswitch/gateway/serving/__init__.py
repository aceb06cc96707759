"""Verbs of the Open Inference Protocol, for all protocols, and the connection to the server."""
