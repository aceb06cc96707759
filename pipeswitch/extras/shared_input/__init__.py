"""Input that several training jobs share: one job loads a batch, and all others use it (ADR 32)."""

GROUPS = {"shared_input": "rings:Rings"}
JOBS = {"shared_input": "loader:SharedLoader", "shared_ring": "ring:Ring"}
