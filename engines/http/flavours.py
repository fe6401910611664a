"""The servers that are known by name: their interfaces, pages and metrics. Data; it sends nothing.

Rules: the first interface of a flavour is its default; a page that a server may leave out is asked for and may be
missing; metrics are matched by the name of their family, whatever their labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.http.dialect import Dialect
from engines.http.dialects.llamacpp import LlamaCpp
from engines.http.dialects.openai import OpenAi
from engines.http.dialects.prompt_logprobs import CompletionScorer, SglangScorer, VllmScorer
from engines.http.dialects.sglang import Sglang
from engines.http.dialects.tgi import Tgi
from engines.http.dialects.vllm_generate import VllmGenerate
from engines.http.scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Flavour:
    """One kind of server.

    `running` and `cached` name gauges and counters on its metrics page (`metrics`, empty: it has none); `pages` are
    JSON pages that describe it, and `started` names the gauge that tells when its process began.
    """

    name: str
    interfaces: Mapping[str, Dialect]
    health: str
    metrics: str = ""
    running: str = ""
    cached: str = ""
    pages: tuple[str, ...] = ()
    started: str = "process_start_time_seconds"
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # server_mode to its flags
    reuse: bool = True  # connections; not where a server closes one that it said it would keep
    scorers: Mapping[str, Scorer] = field(default_factory=dict)  # by interface; others return no prompt's logprobs

    @property
    def default_interface(self) -> str:
        """What `api = auto` stands for."""
        return next(iter(self.interfaces))


_CHAT = OpenAi(chat=True, additions=False)
_LIST = (
    Flavour(
        name="openai", interfaces={"completions": OpenAi(chat=False, additions=False), "chat": _CHAT},
        health="/v1/models",
    ),
    Flavour(
        name="samebits",
        interfaces={
            "completions": OpenAi(chat=False, additions=True, grammars="vllm", seed_limit=2**64),
            "chat": OpenAi(chat=True, additions=True, grammars="vllm", seed_limit=2**64),
        },
        health="/health", metrics="/metrics", running="samebits_requests_running",
        cached="samebits_cached_tokens_total", pages=("/version", "/samebits/fingerprint"),
        modes={name: ("--mode", name) for name in ("deterministic", "ordinary", "free")},
        scorers={"completions": CompletionScorer()},
    ),
    Flavour(
        name="vllm",
        interfaces={
            "completions": OpenAi(chat=False, additions=True, grammars="vllm"),
            "chat": OpenAi(chat=True, additions=True, grammars="vllm"),
            "generate": VllmGenerate(),
        },
        health="/health", metrics="/metrics", running="vllm:num_requests_running",
        cached="vllm:prefix_cache_hits_total", pages=("/version",),
        scorers={"completions": CompletionScorer(), "generate": VllmScorer()},
        modes={"deterministic": (), "ordinary": (), "free": ()},
    ),
    Flavour(
        name="sglang",
        interfaces={
            "generate": Sglang(),
            "completions": OpenAi(chat=False, additions=False, grammars="sglang"),
            "chat": OpenAi(chat=True, additions=False, grammars="sglang"),
        },
        health="/health", metrics="/metrics", running="sglang:num_running_reqs", cached="sglang:cached_tokens_total",
        pages=("/get_server_info", "/get_model_info", "/server_info", "/model_info"),
        modes={"deterministic": ("--enable-deterministic-inference",), "ordinary": (), "free": ()},
        scorers={"generate": SglangScorer()},
    ),
    Flavour(
        name="llamacpp",
        interfaces={"generate": LlamaCpp(), "completions": OpenAi(chat=False, additions=False), "chat": _CHAT},
        health="/health", metrics="/metrics", running="llamacpp:requests_processing", pages=("/props",),
        reuse=False,  # build 11549 hangs up after a stream, and the next request would be lost
    ),
    Flavour(
        name="tgi", interfaces={"generate": Tgi(), "chat": OpenAi(chat=True, additions=False, grammars="none")},
        health="/health", metrics="/metrics", running="tgi_batch_current_size", pages=("/info",),
    ),
)  # fmt: skip

FLAVOURS: dict[str, Flavour] = {flavour.name: flavour for flavour in _LIST}
