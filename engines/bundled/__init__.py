"""The bundled batch-invariant inference engine. It imports nothing of the harness and could live alone."""
