"""The protocol model: every state that the real scheduler can reach in a small world.

``python -m tests.model`` explores. The scheduler, the state tables, the gate, the memory daemon's
guard and the commit area are the product's own code; processes, device and clients are those of
``pipeswitch/simulator``. What is here makes a state of them (``frozen``: taken apart, numbered
anew, put together), chooses what happens next, and says what must hold.
"""
