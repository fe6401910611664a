"""A stand-in for DeepInfer 0.1.0: its signatures and the way its outputs come, on numbers made of hashes."""
