"""The inference engine: client, text processing, scheduling core, model runner, and the transports between
processes."""
