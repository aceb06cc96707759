"""Measuring a profile, keeping it, and noticing that it is not true any more."""
