"""Simulated world around the real scheduler: links, processes, clients, faults and a clock.

``World`` performs the scheduler's commands on simulated processes and passes their messages back.
It runs in one of two ways: by virtual time (``run``: each move takes the time in ``Costs``), or
move by move (``moves``: its driver picks any possible one). Both are pure: no thread, no file, no
clock, and chance only through ``Choices``.

The world checks what a scheduler can break (I1, I4 and I5 of docs/architecture.md) and raises
``Violation``.
"""
