"""Requests of real agents, reduced to their structure: names and texts are our own."""
