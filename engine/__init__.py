"""What runs requests: configuration, messages, sequences, the scheduler, the engine core and its workers."""
