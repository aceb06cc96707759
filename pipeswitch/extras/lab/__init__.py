"""Simulated world around the real scheduler: links, processes, clients, faults and a clock.

``World`` performs the scheduler's commands on simulated processes and passes their messages back.
It runs either by virtual time (``run``: each move takes the time in ``Costs``), or move by move
(``moves``: the caller picks any possible move). Both ways are pure: no thread, file or real clock,
and all random decisions come from ``Choices``.

The world checks the invariants that a scheduler can break (I1, I4 and I5 of docs/architecture.md)
and raises ``Violation``.
"""

CHECKS = {"policy": "contract:check_policy"}
COMMANDS = {
    "plan": "profile_report:plan",
    "profile": "profile_report:profile",
    "simulate": "simulate:simulate",
}
METHODS = {"profile": "profiling:profile"}
