"""Functions of a model's owner, before and after the model (ADR 34), and chains (ADR 42)."""

COMMANDS = {"chain": "command:chain"}
COMPOSITES = {"chain": "chain_requests:ChainRun"}
EFFECTS = {"stage": "effects:StageEffects"}
PARTS = {"chain": "chain_registry:Chains"}
PROCESSES = {"stage": "process:run", "stage_check": "process:check"}
QUEUES = {"stage": "queue:StageQueue"}
WRAPPERS = {"preprocess": "wrapper:stages_of", "postprocess": "wrapper:stages_of"}
