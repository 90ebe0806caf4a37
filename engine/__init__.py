"""The inference engine: client side, text, scheduling core, model runner and what joins their processes."""
