"""LoRA adapters: their files in PEFT's layout (`config`, `weights`), and their part in a step (`layer`, `tokens`)."""
