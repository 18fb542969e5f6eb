"""OpenAI's Responses, both sides."""
