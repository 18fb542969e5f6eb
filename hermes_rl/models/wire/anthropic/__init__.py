"""Anthropic's Messages, both sides."""
