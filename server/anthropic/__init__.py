"""Anthropic's Messages API: from its requests to chats, and from the model's text to its content blocks and events."""
