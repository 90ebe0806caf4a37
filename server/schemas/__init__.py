"""Request and response models: pydantic models for requests, msgspec structs for answers."""
