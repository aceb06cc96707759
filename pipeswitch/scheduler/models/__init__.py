"""Models and their versions: from registration to the way out."""
