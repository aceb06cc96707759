"""``python -m benchmarks NAME`` in a checkout: what is measured, and against what (README.md).

The process that measures never imports torch; everything that computes is a child.
"""
