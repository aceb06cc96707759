"""The protocol model: every state that the real scheduler can reach in a small world.

``python -m tests.model`` explores; the scheduler, the state tables, the worker's gate, the memory
daemon's guard and the commit area are the product's own code. What is modelled is what lies
between them: processes, channels, faults and time.
"""
