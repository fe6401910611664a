"""What a server says of itself, as fingerprint fields of the subject. It judges nothing.

Rules: a page that is missing is no field; what a server computed with decides (identity), what it served and which
process it is does not; everything is prefixed `server.`, for the client's own machine has fields of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from engines.http.client import Client, EndpointError
from engines.http.flavours import Flavour
from engines.http.metrics import read_labels, read_metric
from engines.http.shape import Json
from harness.engine import Field, FieldClass, Scalar
from harness.errors import EngineError
from harness.fingerprint import Fingerprint

SAMEBITS_PAGE = "/samebits/fingerprint"
_CHANGING = frozenset({"internal_states", "last_gen_throughput", "max_req_input_len", "status", "next_slot", "slots",
                       "port", "nccl_port", "dist_init_addr", "random_seed", "log_level", "is_sleeping",
                       "media_marker"})  # fmt: skip
_VLLM_CACHE = "vllm:cache_config_info"
_SECRET = re.compile(r"api_?key|secret|passw|credential|auth|hf_token", re.IGNORECASE)  # servers list their own options


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A server as it describes itself. `began` is its process's start in seconds since 1970, if it tells."""

    model: str
    fields: tuple[Field, ...]
    began: float | None


async def read_identity(client: Client, flavour: Flavour, served_model: str) -> Identity:
    """Reads the pages. Raises EngineError where the server lists no model, or several and none was named."""
    models = await _models(client)
    model = served_model or _only(models, client.url)
    fields = [_field("flavour", flavour.name, "setting"), _field("model", model, "GET /v1/models", "context")]
    card = next((one for one in models if one.get("id") == model), {})
    fields += _flat("model", {key: card[key] for key in ("max_model_len", "root") if key in card}, "GET /v1/models")
    for page in flavour.pages:
        fields += await _page(client, page)
    metrics = await _metrics(client, flavour)
    began = read_metric(metrics, flavour.started) if metrics else None
    fields += _flat("cache_config", read_labels(metrics, _VLLM_CACHE), f"GET {flavour.metrics}")
    return Identity(model=model, fields=_published(fields, client), began=began)


async def _models(client: Client) -> list[Json]:
    try:
        listed = (await client.get_json("/v1/models")).get("data")
    except EndpointError as error:
        if error.status in (404, 405):
            return []
        raise
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _only(models: list[Json], url: str) -> str:
    names = [str(one.get("id")) for one in models]
    if len(names) > 1:
        raise EngineError(
            f"{url}: serves {len(names)} models ({', '.join(sorted(names)[:5])}); name one in served_model"
        )
    return names[0] if names else "default"


async def _page(client: Client, page: str) -> list[Field]:
    """The fields of one page; samebits' own fingerprint keeps its classes."""
    try:
        value = await client.get_json(page)
    except EndpointError:
        return []
    if page == SAMEBITS_PAGE:
        return [
            Field(
                name=f"server.{one.name}",
                value=one.value,
                field_class=one.field_class,
                source=f"GET {page}: {one.source}",
            )
            for one in Fingerprint.from_json(value).fields
        ]
    return _flat(page.strip("/").replace("get_", ""), value, f"GET {page}")


async def _metrics(client: Client, flavour: Flavour) -> str:
    if not flavour.metrics:
        return ""
    try:
        return (await client.get(flavour.metrics)).decode(errors="replace")
    except EndpointError:
        return ""


def _flat(prefix: str, value: Mapping[str, object], source: str) -> list[Field]:
    """Scalars of an object, deeper ones by dotted names; lists as JSON; what changes by itself is context."""
    found: list[Field] = []
    for key in sorted(value):
        item, name = value[key], f"{prefix}.{key}"
        if isinstance(item, dict):
            if key not in _CHANGING:
                found += _flat(name, cast("Json", item), source)
            continue
        scalar = item if isinstance(item, str | int | float | bool) else json.dumps(item, sort_keys=True)
        found.append(_field(name, scalar, source, "context" if key in _CHANGING else "identity"))
    return found


def _field(name: str, value: Scalar, source: str, field_class: FieldClass = "identity") -> Field:
    return Field(name=f"server.{name}", value=value, field_class=field_class, source=source)


def _published(fields: Iterable[Field], client: Client) -> tuple[Field, ...]:
    """One field per name, none that names a secret, and the key nowhere."""
    kept = {field.name: field for field in fields if not _SECRET.search(field.name)}
    return tuple(
        replace(field, value=client.hide(field.value)) if isinstance(field.value, str) else field
        for field in kept.values()
    )
