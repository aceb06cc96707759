"""Fuzzing of everything that outsiders can send. ``make fuzz`` runs it; unit tests replay findings.

A *target* passes bytes to one interface. It raises only for an *escape*: an exception that the
interface must not raise. ``target.py`` defines what a target is, and ``targets.py`` lists them.
The driver (``run.py``, ``child.py``) needs atheris, but the targets do not.
"""
