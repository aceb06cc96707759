"""The protocol model: a search through every state that the real scheduler can reach.

``python -m tests.model`` runs the search. The scheduler, the state tables, the gate, the memory
daemon's guard and the commit area are the product's own code. ``pipeswitch/simulator`` has the
processes, the device and the clients. This package converts all of them into a comparable state
("freezes" them) and back ("thaws" them; see ``frozen``), chooses the next action (``choices``), and
checks the invariants. A *scope* is a small world: how many requests, jobs and faults may occur.
"""
