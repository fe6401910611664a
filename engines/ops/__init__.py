"""Single operators under test: does a row's result depend on what else is in the call, and what does that cost?"""
