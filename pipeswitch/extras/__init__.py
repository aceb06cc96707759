"""Features that the engine does not know, each in a folder (``base/extras.py`` has the seams)."""
