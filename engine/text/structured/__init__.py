"""Structured output: compiles a schema, regex or grammar to masks of the tokens that a step may sample. No torch."""
