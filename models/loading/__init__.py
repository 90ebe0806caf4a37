"""From a checkpoint directory to a filled model, by Kaon's architectures or by transformers' own code."""
