"""The front end's side of the engine: `LLMEngine`, `CoreManager`, supervision, journal, placement. No torch."""
