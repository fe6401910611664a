"""Models by name: the tiny one, SmolLM2, Hugging Face folders and GGUF files. Start at `catalogue`."""
