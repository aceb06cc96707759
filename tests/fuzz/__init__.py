"""Fuzzing what outsiders can send: ``make fuzz`` runs it, the unit tests replay what was found.

A *target* takes bytes to one interface and lets nothing out but an escape: an exception that this
interface does not promise. ``target.py`` says what a target is, ``targets.py`` names all of them;
the driver (``run.py``, ``child.py``) needs atheris, the targets do not.
"""
