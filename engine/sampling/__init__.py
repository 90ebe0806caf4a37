"""From logits to tokens: sampling parameters per row, the sampler, log probabilities, and verification of drafts."""
