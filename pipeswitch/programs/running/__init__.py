"""Running a program: tensors over raw memory, torch's settings, the executor."""
