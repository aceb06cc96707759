"""Modules that every other folder may import: errors, units, settings, and small helpers.

Nothing here imports another folder of the project.
"""
