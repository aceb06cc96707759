"""Scheduler: it decides everything and uses no file, socket, thread, clock or torch."""
