"""Owners and their API keys, the resources that each owner uses, and the limits and fair queues between owners."""
