"""Processes that run functions of a model's owner before and after the model (ADR 34)."""

EFFECTS = {"stage": "effects:StageEffects"}
PROCESSES = {"stage": "process:run", "stage_check": "process:check"}
QUEUES = {"stage": "queue:StageQueue"}
WRAPPERS = {"preprocess": "wrapper:stages_of", "postprocess": "wrapper:stages_of"}
