"""Input that several training jobs share: one job loads a batch, and all others use it (ADR 32)."""
