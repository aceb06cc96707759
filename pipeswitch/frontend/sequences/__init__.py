"""Sequences: state that a request keeps for the next one."""
