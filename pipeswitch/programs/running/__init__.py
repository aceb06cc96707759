"""Execution of programs: tensors over raw memory, torch's settings, the executor."""
