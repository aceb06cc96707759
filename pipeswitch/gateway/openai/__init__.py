"""Text: OpenAI's paths, and the processes that encode and decode it."""
