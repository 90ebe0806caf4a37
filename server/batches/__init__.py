"""Files and batches: many requests in one file, computed at low priority, with a journal on disk."""
