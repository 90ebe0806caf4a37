"""What a checkpoint's JSON files say, read field by field and checked; no torch."""
