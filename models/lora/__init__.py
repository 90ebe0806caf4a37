"""LoRA adapters in PEFT's layout: reading them and attaching them to a loaded model."""
