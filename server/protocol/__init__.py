"""What the endpoints read and write: a pydantic model a request, `msgspec` structs for answers."""
