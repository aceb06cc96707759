"""Decides everything, performs nothing: no file, socket, thread, clock or torch."""
