"""Input that several training jobs share: each batch is made once, for all of them (ADR 32)."""
