"""A prefix cache on disk: the same bits after a restart; damage and other origins are refused by name."""

import dataclasses
import json

import pytest
from engine_cases import evidence, greedy, kernels, options, request, run_all, scripted_engine

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.cache_store import CONTENT, HEADER, restore_cache, save_cache
from engines.bundled.engine import Engine
from engines.bundled.errors import CacheStoreError, NotSupported
from engines.bundled.models.tiny import TinySource

MODEL = TinySource().model()
PROMPT = range(1, 60)
ONE = request("a", PROMPT, greedy(max_tokens=5), logits_digest=True)


def open_engine(model_digest=MODEL.digest, **changes):
    config = options(**{"num_pages": 40, "prefix_cache": True, **changes})
    return Engine(MODEL.config, config, open_arithmetic(MODEL, config), kernels(), str, model_digest=model_digest)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    engine, folder = open_engine(), tmp_path_factory.mktemp("caches") / "store"
    run_all(engine, [ONE])
    assert save_cache(engine, folder) == 15
    return folder


@pytest.mark.parametrize("pages", [40, 20])
def test_a_restored_cache_serves_the_same_bits(store, pages):
    alone = evidence(run_all(open_engine(prefix_cache=False), [ONE])[0])
    engine = open_engine(num_pages=pages)
    assert restore_cache(engine, store) == 15
    (again,) = run_all(engine, [ONE])
    assert again.cached_tokens == 56
    assert evidence(again) == alone


def test_a_smaller_pool_takes_what_fits(store):
    engine = open_engine(num_pages=9)
    assert restore_cache(engine, store) == 9
    (again,) = run_all(engine, [request("b", range(1, 30))])
    assert again.cached_tokens == 28
    engine.check_pages()


def test_saving_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path):
    engine = open_engine()
    run_all(engine, [ONE])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "old").touch()
    save_cache(engine, tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == [CONTENT, HEADER]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "0" * 64}, "model: expected '0000"),
        ({"arithmetic": "free"}, "arithmetic: expected 'free', found 'portable'; definition: expected 0, found 1"),
        ({"page_size": 8}, "page_size: expected 8, found 4; tokens: expected 8, found 4"),
        ({"tuning": 3}, "tuning: expected 3, found 0"),
    ],
)
def test_a_store_of_another_origin_is_refused_by_name(store, changes, message):
    engine = open_engine(**changes)
    with pytest.raises(CacheStoreError, match=f"is of another origin and is not used: {message}"):
        restore_cache(engine, store)
    assert (len(engine.cache), engine.scheduler.pages.free) == (0, 40)


def test_another_version_of_the_definition_is_refused_by_name(store):
    engine = open_engine()
    engine.cache.origin = dataclasses.replace(engine.cache.origin, definition=2)
    with pytest.raises(CacheStoreError, match=r"definition: expected 2, found 1$"):
        restore_cache(engine, store)


def spoil(store, folder, header=lambda text: text, content=lambda data: data):
    folder.mkdir()
    (folder / HEADER).write_text(header((store / HEADER).read_text()))
    (folder / CONTENT).write_bytes(content((store / CONTENT).read_bytes()))
    return folder


def changed(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"content": lambda data: data[:-1] + bytes([data[-1] ^ 1])}, "pages.f32 is damaged: SHA-256"),
        ({"content": lambda data: data[:-4]}, "pages.f32 is damaged: SHA-256"),
        ({"header": lambda text: text[:-9]}, "store.json is damaged"),
        ({"header": changed(schema=2)}, "schema: expected 1, found 2"),
        ({"header": changed(keys=["00"] * 15)}, "store.json is damaged: its keys"),
        ({"header": changed(origin={})}, "model: expected .*, found None"),
    ],
)
def test_a_damaged_store_is_refused(store, tmp_path, how, message):
    engine = open_engine()
    with pytest.raises(CacheStoreError, match=message):
        restore_cache(engine, spoil(store, tmp_path / "bad", **how))
    assert (len(engine.cache), engine.scheduler.pages.free) == (0, 40)


def test_what_cannot_be_read_written_or_taken_in_is_said(store, tmp_path):
    with pytest.raises(CacheStoreError, match="cannot be read: No such file"):
        restore_cache(open_engine(), tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CacheStoreError, match="cannot be written: Not a directory"):
        save_cache(open_engine(), tmp_path / "file" / "store")
    with pytest.raises(NotSupported, match="runs without a prefix cache"):
        save_cache(open_engine(prefix_cache=False), tmp_path / "store")
    with pytest.raises(NotSupported, match="keeps its pages outside this process"):
        save_cache(scripted_engine(options(prefix_cache=True)), tmp_path / "store")
    used = open_engine()
    run_all(used, [ONE])
    with pytest.raises(CacheStoreError, match="has served something already"):
        restore_cache(used, store)
