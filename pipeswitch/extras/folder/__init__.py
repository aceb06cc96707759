"""A watched folder of models: ``[server] models``."""

EFFECTS = {"folder": "watch:FolderEffects"}
PROCESSES = {"folder": "watch:run"}
