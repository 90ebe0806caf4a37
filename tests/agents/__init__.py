"""What real agents send, reduced to its structure: names and texts are our own."""
