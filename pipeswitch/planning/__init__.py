"""Planner: chooses the groups in which a model is copied, from the costs of its layers.

Only ``profile_files.py`` does I/O: all other modules use no thread, clock, socket, file or torch.
"""
