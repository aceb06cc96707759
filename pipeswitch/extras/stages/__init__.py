"""Processes that run functions of a model's owner before and after the model (ADR 34)."""

PROCESSES = {"stage": "process:run", "stage_check": "process:check"}
