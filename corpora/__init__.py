"""The shipped corpora: data only; `harness.corpus` reads them."""
