"""Text in and out: tokenizer, chat template, request building, detokenizer. No torch."""
