"""Sequences: what one request leaves for the next."""
