"""Settings: `Config` and its sections, the checkpoint that they name, the release."""
