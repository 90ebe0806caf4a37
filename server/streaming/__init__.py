"""Running a request: its sequences, their delivery, back-pressure and server-sent events."""
