"""Text over HTTP, OpenAI's ``/v1`` and Triton's ``generate``, and a chat in the terminal."""

COMMANDS = {"chat": "chat:chat", "generate": "chat:generate", "run": "chat:run"}
DOORS = {"text": "completions:text_door"}
KINDS = {"generation": "generations:Generations"}
METHODS = {"generate": "generation_stream:generated"}
PROCESSES = {"schema": "schema_process:check_schema"}
