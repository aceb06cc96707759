"""Sandbox of processes that run clients' programs: allowed system calls and files (ADR 20)."""
