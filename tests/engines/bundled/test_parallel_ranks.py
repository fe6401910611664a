"""Several processes share a model: the bits of one process, and what happens when one of them is lost.

Starting a rank imports torch, so groups are shared: tests that break one come last and take the one they break.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from arithmetic_cases import options, pages_for, same, step, tokens

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import Closes, Ranked
from engines.bundled.cache_store import HostMemory
from engines.bundled.errors import NotSupported, RankError
from engines.bundled.models.catalogue import open_source
from engines.bundled.parallel import ranks
from engines.bundled.parallel.cores import pin
from engines.bundled.parallel.ranks import Binding, ParallelArithmetic, RankProcess, open_parallel

DENSE, MOE = (open_source(name).model() for name in ("tiny", "tiny-moe"))
CONFIG = options(num_pages=40, page_size=16)
CORES = os.sched_getaffinity(0)
DEADLINE_S = 15.0  # a rank of a tiny model is never this late, but a machine may be slow


def steps():
    """Four prompts together, then two decodes in which all meet."""
    table = pages_for(CONFIG, rows=4)
    yield step([(row, 0, tokens(row, 3 + 7 * row)) for row in range(4)], table)
    for i in range(2):
        yield step([(row, 3 + 7 * row + i, tokens(90 + i, 1)) for row in range(4)], table)


def run(arithmetic):
    return [arithmetic.forward(batch) for batch in steps()]


def alone(model, **changes):
    return run(open_arithmetic(model, dataclasses.replace(CONFIG, **changes)))


def equal(ones, others):
    return [same(one, other) for one, other in zip(ones, others, strict=True)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.05)
    return condition()


def opened(name, model, deadline_s=120.0, device="cpu", **changes):
    return open_parallel(name, model, dataclasses.replace(CONFIG, **changes), device=device, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def three():
    """The tiny model over three ranks, one of them without a head."""
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=3)
    yield arithmetic
    arithmetic.close()


@pytest.fixture(scope="module")
def two():
    """The tiny mixture over two ranks: everything is split, experts included."""
    arithmetic = opened("tiny-moe", MOE, DEADLINE_S, tensor_parallel_size=2, expert_parallel_size=2)
    yield arithmetic
    arithmetic.close()


def test_three_ranks_give_the_bits_of_one(three):
    assert equal(run(three), alone(DENSE)) == [True] * 3


def test_the_steps_are_a_fair_question():
    """Sums in another order must show in them."""
    assert equal(alone(DENSE, arithmetic="free"), alone(DENSE)) == [False] * 3


def test_each_rank_holds_its_part(three):
    whole = open_arithmetic(DENSE, CONFIG).counts()[0]
    counts = three.counts()
    assert len({count["pid"] for count in counts}) == 3
    assert [count["kv_bytes"] for count in counts] == [whole["kv_bytes"] // 2, whole["kv_bytes"] // 2, 0]
    assert all(count["weight_bytes"] < 0.7 * whole["weight_bytes"] for count in counts)
    assert len({count["steps"] for count in counts}) == 1
    mine = open_arithmetic(DENSE, CONFIG).describe()[
        "threads_seen"
    ]  # the first rank shares this process, and its threads, with other tests
    assert [count["threads_seen"] for count in counts] == [mine, 1, 1]


def test_a_group_says_what_it_is(three):
    assert isinstance(three, Ranked)
    assert isinstance(three, Closes)
    assert not isinstance(three, HostMemory)  # a prefix cache on disk would hold one rank's pages alone
    assert three.describe()["collectives"].startswith("gloo of torch ")
    assert (three.name, three.definition) == ("portable", 1)


def test_a_mixture_over_two_ranks_gives_the_bits_of_one(two):
    assert equal(run(two), alone(MOE)) == [True] * 3


def test_each_rank_holds_half_of_the_experts(two):
    whole = open_arithmetic(MOE, CONFIG).counts()[0]["weight_bytes"]
    assert all(count["weight_bytes"] < 0.6 * whole for count in two.counts())


def test_steps_without_wanted_logits_are_steps_of_all(three):
    batch = next(steps())
    found = three.forward(dataclasses.replace(batch, wanted=np.empty(0, np.int32)))
    assert found.shape == (0, 512)
    assert equal(run(three), alone(DENSE)) == [True] * 3


def test_experts_alone_are_split_and_free_adds_as_the_library_does():
    arithmetic = opened("tiny-moe", MOE, expert_parallel_size=2, arithmetic="free")
    try:
        first, again = run(arithmetic), run(arithmetic)
        check_that_a_step_broken_off_ends_the_ranks(arithmetic)
    finally:
        arithmetic.close()
    assert equal(first, again) == [True] * 3  # noise would be no control
    assert not any(equal(first, alone(MOE, arithmetic="free")))


def check_that_a_step_broken_off_ends_the_ranks(arithmetic):
    """Else the next step would meet the rest of this one."""

    def short_of_memory(batch):
        raise MemoryError("as planned")

    pid = arithmetic.counts()[1]["pid"]
    arithmetic._local.forward = short_of_memory
    with pytest.raises(MemoryError, match="as planned"):
        run(arithmetic)
    assert not is_running(pid)
    with pytest.raises(RankError, match=r"the first rank broke a step off \(MemoryError\('as planned'\)\)"):
        run(arithmetic)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (DENSE, {"arithmetic": "native", "tensor_parallel_size": 2}, "portable and free can be split"),
        (DENSE, {"expert_parallel_size": 2}, "the model has 0 experts"),
        (MOE, {"expert_parallel_size": 9}, "expert_parallel_size 9: the model has 8 experts"),
        (MOE, {"tensor_parallel_size": 2, "expert_parallel_size": 4}, "expected equal, or one of them 1"),
    ],
)
def test_what_cannot_be_split_is_refused_before_a_process_starts(model, changes, message):
    with pytest.raises(NotSupported, match=message):
        opened("tiny", model, **changes)


def test_a_rank_with_other_weights_is_named_and_ended():
    config = dataclasses.replace(CONFIG, tensor_parallel_size=2)
    message = f"rank 1 .* does not match the first rank: model digest: expected '{DENSE.digest}', found '{MOE.digest}'"
    with pytest.raises(RankError, match=message) as caught:
        open_parallel("tiny", DENSE, config, others={1: "tiny-moe"})
    pid = int(str(caught.value).split("process ")[1].split(")")[0])
    assert not is_running(pid)


def test_a_rank_that_cannot_load_its_model_says_why():
    config = dataclasses.replace(CONFIG, tensor_parallel_size=2)
    with pytest.raises(RankError, match=r"rank 1 .*: ModelError: model 'tiny-moo'"):
        open_parallel("tiny", DENSE, config, others={1: "tiny-moo"})


def test_a_port_in_use_is_named():
    before = children_of(os.getpid())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=rf"rendezvous_port {port} of 127\.0\.0\.1 cannot be opened: it is in use"):
            opened("tiny", DENSE, tensor_parallel_size=2, rendezvous_port=port)
    assert children_of(os.getpid()) == before


def children_of(pid):
    """Ranks, by parent process id."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
            command = (entry.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and b"engines.bundled.parallel.rank" in command:
            found.append(int(entry.parent.name))
    return sorted(found)


def test_a_silent_rank_is_named_by_the_deadline(two):
    pid = two.counts()[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(RankError, match=rf"of 2 ranks, rank 1 \(process {pid}\) is running, but takes no part"):
        run(two)
    assert time.monotonic() - begun < 10 * DEADLINE_S
    assert not is_running(pid)


def test_a_rank_killed_in_a_step_is_named_and_nobody_stays_behind(three):
    """And this process is bound to no cores any more."""
    pids = [count["pid"] for count in three.counts()[1:]]
    embed = three._local._embed

    def kill_and_embed(token, out):  # the first thing of a step, which all ranks have been told by now
        os.kill(pids[1], signal.SIGKILL)
        embed(token, out)

    three._local._embed = kill_and_embed
    message = rf"of 3 ranks, rank 2 \(process {pids[1]}\) was ended by signal SIGKILL"
    with pytest.raises(RankError, match=message):
        run(three)
    assert not any(map(is_running, pids))
    with pytest.raises(RankError, match=message):  # and so it stays
        three.counts()
    assert three._binding not in Binding._bound


def test_a_rank_may_start_late_and_may_be_lost_between_steps(monkeypatch):
    delayed = []

    class LateRank(RankProcess):
        def __init__(self, rank):
            super().__init__(rank)
            os.kill(self.pid, signal.SIGSTOP)
            delayed.append(threading.Timer(2.0, os.kill, (self.pid, signal.SIGCONT)))
            delayed[-1].start()

    monkeypatch.setattr(ranks, "RankProcess", LateRank)
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2)
    try:
        assert equal(run(arithmetic), alone(DENSE)) == [True] * 3
        pid = arithmetic.counts()[1]["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=rf"of 2 ranks, rank 1 \(process {pid}\) was ended by signal SIGKILL"):
            run(arithmetic)
    finally:
        arithmetic.close()
    assert not is_running(pid)


def test_a_rank_that_never_starts_is_named_by_the_deadline(monkeypatch):
    class StoppedRank(RankProcess):
        def __init__(self, rank):
            super().__init__(rank)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(ranks, "RankProcess", StoppedRank)
    monkeypatch.setattr(ranks, "START_S", 1.0)
    before = children_of(os.getpid())
    with pytest.raises(RankError, match=r"rank 1 \(process [0-9]+\): no answer within 1 s"):
        opened("tiny", DENSE, tensor_parallel_size=2)
    assert children_of(os.getpid()) == before


PARENT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import test_parallel_ranks as t
arithmetic = t.opened("tiny", t.DENSE, tensor_parallel_size=3)
t.run(arithmetic)
pids = [count["pid"] for count in arithmetic.counts()[1:]]
if sys.argv[2] == "in a step":
    os.kill(pids[1], signal.SIGSTOP)
    broadcast = arithmetic._group.broadcast
    arithmetic._group.broadcast = lambda numbers: (print(*pids, flush=True), broadcast(numbers))
    t.run(arithmetic)
print(*pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_ranks_end_when_the_first_one_is_killed(when):
    command = [sys.executable, "-c", PARENT, str(Path(__file__).parent), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        parent.kill()
    assert wait_for(lambda: not is_running(pids[0]))
    os.kill(pids[1], signal.SIGCONT)  # a stopped process cannot end
    assert wait_for(lambda: not is_running(pids[1]))


@pytest.fixture
def unbound(monkeypatch):
    """Nobody else holds cores of this process: ranks of other tests may live on, bound."""
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(Binding, "_bound", [])
    pin(sorted(CORES))
    yield
    pin(sorted(before))


@pytest.mark.usefixtures("unbound")
def test_each_rank_is_bound_to_cores_of_its_own_where_there_are_enough():
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2)
    try:
        counts = arithmetic.counts()
        bound = [os.sched_getaffinity(count["pid"]) for count in counts]
        words = arithmetic.describe()["rank_cores"]
    finally:
        arithmetic.close()
    assert [count["cores"] for count in counts] == [len(cores) for cores in bound]
    if len(CORES) < 2:
        assert (words, bound) == ("shared cores: fewer of them than ranks x threads", [CORES] * 2)
    else:
        assert words == "own cores"
        assert [len(cores) for cores in bound] == [1, 1]
        assert bound[0].isdisjoint(bound[1])
    assert os.sched_getaffinity(0) == CORES


@pytest.mark.usefixtures("unbound")
def test_two_groups_at_once_share_no_core_whichever_is_closed_first(monkeypatch):
    bound = []
    monkeypatch.setattr(ranks, "usable_cores", lambda: [0, 1, 2, 3, 4])
    monkeypatch.setattr(ranks, "pin", bound.append)
    first, second, third = Binding(2, 1), None, None
    first.bind()
    second = Binding(2, 1)
    second.bind()
    third = Binding(2, 1)  # one core is left
    third.bind()
    assert (first.cores, second.cores, third.cores) == (((0,), (1,)), ((2,), (3,)), ((), ()))
    assert third.words == "shared cores: fewer of them than ranks x threads"
    first.undo()
    third.undo()
    second.undo()
    second.undo()
    assert bound == [[0], [0, 2], [2], [0, 1, 2, 3, 4]]


@pytest.mark.usefixtures("unbound")
def test_ranks_share_cores_where_there_are_too_few(monkeypatch):
    monkeypatch.setattr(ranks, "usable_cores", lambda: [0])
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2)
    try:
        assert arithmetic.describe()["rank_cores"] == "shared cores: fewer of them than ranks x threads"
        assert [count["cores"] for count in arithmetic.counts()] == [len(os.sched_getaffinity(0))] * 2
        assert equal(run(arithmetic), alone(DENSE)) == [True] * 3
    finally:
        arithmetic.close()


def test_other_ranks_find_this_package_where_it_was_not_installed(monkeypatch):
    """They run without the folder they are started in, and behind what the environment names."""
    root = str(Path(ranks.__file__).resolve().parents[3])
    monkeypatch.setenv("PYTHONPATH", f"/first{os.pathsep}/second")
    assert ranks._search_path().split(os.pathsep) == ["/first", "/second", root]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}/second")
    assert ranks._search_path().split(os.pathsep) == [root, "/second"]
    monkeypatch.delenv("PYTHONPATH")
    assert ranks._search_path() == root


class Place:
    """One rank's in a group that nobody can leave before all others leave it, too."""

    def __init__(self, everyone):
        self._everyone, self._thread, self.left = everyone, None, False

    def close(self):
        self._everyone.wait(10.0)
        self.left = True

    def dismiss(self):
        self._thread = threading.Thread(target=self.close)
        self._thread.start()

    def end(self):
        if self._thread is None:
            self.dismiss()
        self._thread.join()


def test_all_ranks_leave_a_group_at_the_same_time():
    """Over NCCL each waits there for the others, so none may be waited for before all are told."""
    everyone = threading.Barrier(4)
    first, *others = places = [Place(everyone) for _ in range(4)]
    arithmetic = ParallelArithmetic.__new__(ParallelArithmetic)
    arithmetic._others, arithmetic._group, arithmetic._binding = others, first, Binding(1, 1)
    arithmetic.close()
    assert all(place.left for place in places)
