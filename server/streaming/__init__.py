"""Running a request: submission of its sequences, delivery of outputs, back-pressure and server-sent events."""
