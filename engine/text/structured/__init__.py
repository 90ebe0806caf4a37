"""Structured output: from a schema, regex or grammar to the tokens that a step may sample. No torch."""
