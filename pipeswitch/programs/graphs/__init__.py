"""A program as data: the bundle, its operators, and the callables made from it."""
