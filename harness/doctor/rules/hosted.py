"""Hosted services: no seed accepted, or a seed at best effort."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Scan
from harness.doctor.rules.seeds import is_greedy, seed_field

_SEEDLESS = {"anthropic": "Anthropic's messages API", "openai-responses": "OpenAI's responses API"}


def find_seedless(scan: Scan) -> Iterator[Hit]:
    """A hosted call that cannot take a seed."""
    for document in scan.documents:
        for request in document.requests:
            if request.api in _SEEDLESS:
                yield Hit(request.place, f"{_SEEDLESS[request.api]} accepts no seed", request.api)


def find_best_effort(scan: Scan) -> Iterator[Hit]:
    """A hosted seed whose service fingerprint nobody records."""
    for document in scan.documents:
        if "system_fingerprint" in document.words:
            continue
        for request in document.requests:
            if request.api == "openai" and seed_field(request) is not None and not request.open:
                yield Hit(
                    request.place, "the service promises best effort, and system_fingerprint is not recorded", "seed"
                )


def find_hosted_greedy(scan: Scan) -> Iterator[Hit]:
    """Temperature 0 at a hosted service, with no seed."""
    for document in scan.documents:
        for request in document.requests:
            if request.api == "openai" and is_greedy(request) and seed_field(request) is None and not request.open:
                yield Hit(
                    request.fields["temperature"].place, "temperature 0 at a hosted service is not reproducible", ""
                )


RULES = (
    Rule(
        id="hosted-no-seed",
        engine="hosted",
        severity=Severity.WARNING,
        title="A hosted API that accepts no seed",
        why="Nothing the caller sends can fix the draw.",
        mend="Store the answers, or watch the service with canaries instead of comparing runs.",
        scan=find_seedless,
    ),
    Rule(
        id="hosted-best-effort",
        engine="hosted",
        severity=Severity.NOTE,
        title="A hosted seed without its fingerprint",
        why="Equal seeds give equal answers at best while system_fingerprint stays the same.",
        mend="Record response.system_fingerprint with every answer.",
        facts="openai/openai-python#708",
        scan=find_best_effort,
    ),
    Rule(
        id="hosted-temperature-zero",
        engine="hosted",
        severity=Severity.WARNING,
        title="Temperature 0 at a hosted service",
        why="Batches, versions and machines behind the service change; modal shares of 0.60 to 0.98 were measured.",
        mend="Send a seed and record system_fingerprint, and expect no more than best effort.",
        facts="a public endpoint study over providers, structured JSON",
        scan=find_hosted_greedy,
    ),
)
