"""Accounting by owner: API keys and the admission queue in front of the engine."""
