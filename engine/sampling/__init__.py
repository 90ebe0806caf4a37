"""From logits to tokens: sampling parameters to rows, the sampler, log probabilities, and verification of drafts."""
