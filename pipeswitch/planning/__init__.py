"""Planner: computes the groups in which a model is copied from the costs of its layers. Pure.

It uses no thread, clock, socket, file or torch. ``grouping.py`` also works without a profile.
"""
