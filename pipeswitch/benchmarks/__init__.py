"""Benchmarks behind ``pipeswitch bench``: what is measured, and against what (benchmarks/README).

The process that measures never imports torch; everything that computes is a child.
"""
