"""The protocol model: every state that the real scheduler can reach in a small world.

``python -m tests.model`` explores. The scheduler, the state tables, the gate, the memory daemon's
guard and the commit area are the product's own code; processes, device and clients are those of
``pipeswitch/simulator``. This package freezes all of them into a state and thaws it again
(``frozen``), chooses the next action (``choices``), and checks the invariants.
"""
