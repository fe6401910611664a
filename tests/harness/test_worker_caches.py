"""Which caches are identity: all of them, or those that an engine says can decide what it computes."""

import os

from engines.bundled_caches import TunesNothing
from engines.bundled_disaggregated import Disaggregated
from engines.bundled_lifetime import BundledLifetime
from engines.bundled_replicas import ReplicaFront
from engines.bundled_vision import VisionLifetime
from engines.fake_lifetime import FakeLifetime
from harness.engine import NamesItsCaches
from harness.fingerprint.host import host_fields
from harness.fingerprint.kernel_caches import CACHES
from harness.worker import _with_caches

NAMES = {cache.field for cache in CACHES}


class OneDecides:
    def deciding_caches(self):
        return frozenset({"cache.triton"})


def classes(engine):
    host = host_fields(os.environ)
    fields = _with_caches(host, engine)
    assert [field.name for field in fields] == [field.name for field in host]
    assert [field.value for field in fields if field.name in NAMES] == [f.value for f in host if f.name in NAMES]
    others = [field for field in fields if field.name not in NAMES]
    assert [field.name for field in others] == [field.name for field in host if field.name not in NAMES]
    assert all(field in host for field in others)
    return {field.name: field.field_class for field in fields if field.name in NAMES}


def test_an_engine_that_says_nothing_has_every_cache_as_identity():
    assert classes(object()) == dict.fromkeys(NAMES, "identity")
    assert not issubclass(FakeLifetime, NamesItsCaches)


def test_what_decides_nothing_is_lineage_and_says_so():
    assert classes(OneDecides()) == {**dict.fromkeys(NAMES, "lineage"), "cache.triton": "identity"}
    sources = {field.name: field.source for field in _with_caches(host_fields(os.environ), OneDecides())}
    assert "decides nothing in this engine" in sources["cache.vllm"]
    assert "decides nothing" not in sources["cache.triton"]


def test_every_lifetime_of_the_bundled_engine_tunes_nothing():
    assert classes(TunesNothing()) == dict.fromkeys(NAMES, "lineage")
    for kind in (BundledLifetime, Disaggregated, ReplicaFront, VisionLifetime):
        assert issubclass(kind, NamesItsCaches)
