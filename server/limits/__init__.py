"""What a client may use: API keys, and the bounded queue in front of the engine with its limits for each key."""
