"""Models as they come: which are served equal to the bit, which are refused and why.

``make models`` (``python -m tests.models``) registers each model of ``catalogue`` with a real
server, as a user would who has the module in hand, asks it at two batches, and compares every bit
with the plain module. It writes a table of models and one of operators.
"""
