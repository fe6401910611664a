"""`samebits serve`: the bundled engine behind an OpenAI-compatible HTTP server."""
