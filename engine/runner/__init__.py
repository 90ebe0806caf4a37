"""Runs one rank's model step by step: ModelRunner, input batch, captured graphs, memory sizing, warm-up and start
checks. Imports torch.
"""
