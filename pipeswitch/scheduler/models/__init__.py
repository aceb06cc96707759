"""Models and their versions, from registration to removal."""
