"""Models as users bring them: each is served with bit-equal answers, or refused with a reason.

``make models`` (``python -m tests.models``) registers each model of ``catalogue`` with a real
server, as a user with the module at hand would. It sends requests with two batch sizes and compares
every bit with the plain module. It writes a table of models and one of operators.
"""
