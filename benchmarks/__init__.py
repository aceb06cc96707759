"""Benchmarks of PipeSwitch: ``python -m benchmarks NAME`` in a checkout (README.md).

The measuring process never imports torch; child processes do everything that computes.
"""
