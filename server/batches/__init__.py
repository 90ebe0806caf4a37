"""Files and batches: many requests in one file, computed behind live traffic, with a journal on disk."""
