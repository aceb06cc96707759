"""Fuzzing of all that outsiders can send: ``make fuzz`` runs it, unit tests replay its findings.

A *target* passes bytes to one interface. It raises only for an *escape*: an exception that the
interface does not promise. ``target.py`` defines a target, and ``targets.py`` lists all of them.
The driver (``run.py``, ``child.py``) needs atheris, but the targets do not.
"""
