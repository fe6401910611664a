"""From a finished run to a release: policy and gate, nightly history, attribution, and the archive."""
