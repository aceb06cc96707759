"""System calls that a process with clients' programs may make (ADR 20)."""
