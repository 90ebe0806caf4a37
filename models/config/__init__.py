"""What a checkpoint's JSON files and the headers of its weights say, read field by field and checked; no torch."""
