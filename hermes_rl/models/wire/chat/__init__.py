"""OpenAI's Chat Completions, both sides."""
