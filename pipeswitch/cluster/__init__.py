"""Servers on many machines: Ray starts, watches and restarts them, but requests bypass Ray."""
