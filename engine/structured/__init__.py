"""Structured output: from a request's schema, regex or grammar to the tokens that each step may sample.

The front end compiles (`compile`, in a process that it may lose: `check_process`, `checker`); the engine core makes
matchers (`matchers`, `vocabulary`) and gives them to sequences (`admission`). Over the llguidance library.
"""
