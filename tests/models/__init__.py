"""Test of many users' models: each is served with bit-equal answers, or refused with a reason.

``make models`` (``python -m tests.models``) registers each model of ``catalogue`` with a real
server, like a user who has the module. It sends requests with two batch sizes, and compares every
bit with the plain module. It writes a table of models and a table of operators.
"""
