"""Whether a missing vLLM fails the tests or leaves them UNSUPPORTED."""


def must_run(environ):
    """Whether a missing vLLM is a failure: in CI, and where SAMEBITS_REQUIRE names it."""
    required = environ.get("SAMEBITS_REQUIRE", "").replace(",", " ").split()
    return "vllm" in required or environ.get("CI", "").lower() not in ("", "0", "false")
