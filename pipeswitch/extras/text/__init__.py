"""Text: language models; doors of OpenAI, Anthropic, Ollama and Triton; a chat in the terminal."""

BUILDERS = {
    "embedding": "builders:embedding",
    "generate": "builders:DecoderBuilder",
    "gguf": "builders:gguf_notes",
}
COMMANDS = {"chat": "chat:chat", "generate": "chat:generate", "run": "chat:run"}
DOORS = {
    "anthropic": "anthropic:anthropic_door",
    "ollama": "ollama:ollama_door",
    "responses": "responses:responses_door",
    "text": "completions:text_door",
}
KINDS = {"generation": "generations:Generations"}
METHODS = {"generate": "generation_stream:generated"}
PROCESSES = {"schema": "decoding.grammar:schema_process"}
RUNNERS = {"generation": "decode:DecodeRunner"}
SETTINGS = {"generation": "decoding.generation_settings:read_settings"}
