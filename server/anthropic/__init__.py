"""Anthropic's Messages API: converts its requests to chats, and model text to its content blocks and events."""
