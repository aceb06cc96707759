"""Sequences: state that one request leaves for the next."""
