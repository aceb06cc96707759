"""The planner: from what a model's layers cost to the groups it travels in. Pure.

No thread, clock, socket, file or torch. ``grouping.py`` has what needs no profile.
"""
