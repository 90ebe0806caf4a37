"""Answers in each endpoint's form, streamed and whole: a renderer an endpoint, behind `Renderer`."""
