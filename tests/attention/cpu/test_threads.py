"""The number of threads changes the speed but no bit of the result, across pool sizes, callers and forks."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from fastattention_vllm.attention.cpu import kernels as cpu
from fastattention_vllm.attention.problem import AttentionProblem
from tests.attention import oracle
from tests.attention.oracle import Case

pytestmark = pytest.mark.usefixtures("restore_threads")

# Prefill blocks, decode splits with merges, and short sequences in one batch.
CASE = Case((1, 200, 20, 1), (9000, 500, 4000, 30), num_heads=8, num_kv_heads=2, dtype=torch.bfloat16, sinks=5.0)
# Row blocks depend only on the rows of their own sequence. The start of a window depends on the block, and so do the
# bits.
MANY_ROWS = Case((200, 400), (1000, 1500), 128, 64, head_size=16, dtype=torch.bfloat16, window=(300, -1))
FP16 = replace(CASE, num_heads=16, dtype=torch.float16)


def run(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = cpu.run(problem, return_lse=True)
    assert lse is not None
    return out, lse


def assert_same_bits(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


@pytest.mark.parametrize("case", [CASE, FP16], ids=["bf16", "fp16"])
def test_any_number_of_threads_gives_the_same_bits(isa: str, case: Case) -> None:
    problem = case.build()
    cpu.set_num_threads(1)
    expected = run(problem)
    for count in (2, 3, 5, 16):
        cpu.set_num_threads(count)
        assert cpu.num_threads() == count
        for _ in range(3):
            assert_same_bits(run(problem), expected)


@pytest.mark.parametrize("case", [CASE, MANY_ROWS, FP16], ids=["few rows", "many rows", "fp16"])
def test_the_rest_of_the_batch_does_not_change_a_sequence(isa: str, case: Case) -> None:
    problem = case.build()
    out, lse = run(problem)
    starts = problem.query_start_loc.tolist()
    assert problem.block_table is not None
    for seq, (begin, end) in enumerate(itertools.pairwise(starts)):
        alone = replace(
            problem,
            query=problem.query[begin:end],
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=problem.seq_lens[seq : seq + 1],
            block_table=problem.block_table[seq : seq + 1],
        )
        assert_same_bits(run(alone), (out[begin:end], lse[begin:end]))


def test_callers_from_several_threads_take_turns() -> None:
    cpu.set_num_threads(3)
    cases = [replace(CASE, seed=seed, q_lens=(1, 40, 20, seed)) for seed in range(4)]
    problems = [case.build() for case in cases]
    expected = [run(problem) for problem in problems]
    failures: list[BaseException] = []

    def caller(index: int) -> None:
        try:
            for _ in range(30):
                assert_same_bits(run(problems[index]), expected[index])
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in callers:
        thread.start()
    for count in (2, 5, 1, 4):  # resizing also waits for its turn
        cpu.set_num_threads(count)
    for thread in callers:
        thread.join()
    assert not failures, failures


def test_writes_and_attention_from_several_threads(isa: str) -> None:
    """Each caller fills a part of the cache: in one call that the pool shares, then again in many small calls."""
    cpu.set_num_threads(3)
    problem = CASE.build()
    expected = run(problem)
    rows = torch.randn(1600, 2, 64)
    later = rows + 1
    key_cache, value_cache = torch.zeros(2, 8, 200, 2, 64)
    failures: list[BaseException] = []

    def write(first: int, count: int, key: torch.Tensor, value: torch.Tensor) -> None:
        part = slice(first, first + count)
        cpu.write_kv(key[part], value[part], key_cache, value_cache, torch.arange(first, first + count))

    def caller(index: int) -> None:
        try:
            first = index * 400
            write(first, 400, rows, rows)
            assert_same_bits(run(problem), expected)
            for few in range(first, first + 400, 4):
                write(few, 4, later, -rows)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=caller, args=(index,)) for index in range(4)]
    for thread in callers:
        thread.start()
    cpu.set_num_threads(2)
    for thread in callers:
        thread.join()
    assert not failures, failures
    assert torch.equal(key_cache.view(1600, 2, 64), later)
    assert torch.equal(value_cache.view(1600, 2, 64), -rows)


def test_calls_after_the_workers_went_to_sleep() -> None:
    cpu.set_num_threads(4)
    problem = CASE.build()
    expected = run(problem)
    for pause in (0.0, 0.0001, 0.02, 0.0, 0.05):
        threading.Event().wait(pause)
        assert_same_bits(run(problem), expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_every_thread_of_the_pool_is_woken(threads: int) -> None:
    """More threads than one thread wakes by itself, so the woken threads must wake the rest."""
    cpu.set_num_threads(threads)
    for pause in (0.0, 0.02):
        threading.Event().wait(pause)
        # None: a thread did not arrive within a second, which happens on busy machines.
        seconds = next((found for _ in range(60) if (found := cpu.measure_wake()) is not None), None)
        assert seconds is not None, "a thread never woke up"
        assert seconds > 0
    cpu.set_num_threads(1)
    assert cpu.measure_wake() == 0


def alive_in_child(problem: AttentionProblem, expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Fork; the child computes and resizes its pool. An alarm kills a child that hangs."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler would wait for the hung call to return
        signal.alarm(300)
        status = 1
        try:
            assert_same_bits(run(problem), expected)
            cpu.set_num_threads(2)
            assert_same_bits(run(problem), expected)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_computes_with_its_own_pool() -> None:
    cpu.set_num_threads(4)
    problem = CASE.build()
    expected = run(problem)
    assert alive_in_child(problem, expected)
    assert_same_bits(run(problem), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_fork_while_another_thread_computes() -> None:
    cpu.set_num_threads(3)
    problem = CASE.build()
    expected = run(problem)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            run(problem)

    worker = threading.Thread(target=busy)
    worker.start()
    try:
        for _ in range(10):
            assert alive_in_child(problem, expected)
    finally:
        stop.set()
        worker.join()


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_process_ends_cleanly_with_sleeping_spinning_and_computing_workers() -> None:
    code = """
import threading, time
from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention.cpu.test_threads import CASE, run
cpu.set_num_threads(4)
problem = CASE.build()
{0}
"""
    endings = {
        "spinning": "run(problem)",
        "asleep": "run(problem); time.sleep(0.05)",
        "computing": "\n".join(
            [
                # No torch operator in the loop: torch aborts any process that exits while a daemon thread runs one.
                "out = problem.query.clone()",
                "def forever():",
                "    while True: cpu.run(problem, out)",
                "threading.Thread(target=forever, daemon=True).start()",
                "time.sleep(0.1)",
            ]
        ),
    }
    for ending in endings.values():
        done = _python(code.format(ending))
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""


def test_a_thread_that_loses_its_cpu_stops_polling() -> None:
    """Beside a busy process, it would use up its share of the CPU, and then wait for it when there is work."""
    code = """
import os, subprocess, sys, time
from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention.cpu.test_threads import CASE, run
shared = max(os.sched_getaffinity(0))
busy = [sys.executable, "-c", "import os; os.sched_setaffinity(0, [%d]); print(flush=True)\\nwhile True: pass" % shared]
cpu.set_num_threads(2, [min(os.sched_getaffinity(0)), shared])
cpu.set_spin(1.0)
problem = CASE.build()
neighbour = subprocess.Popen(busy, stdout=subprocess.PIPE)
try:
    neighbour.stdout.read(1)
    run(problem)
    began = time.process_time()
    time.sleep(0.9)
    print(time.process_time() - began)
finally:
    neighbour.kill()
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.2  # alone on its CPU it polls for 0.9 s, with half of it for 0.45


def test_the_pool_survives_dlclose_and_reload() -> None:
    code = """
import _ctypes, ctypes, os, time
from fastattention_vllm.attention.cpu import library as cpu_library
for _ in range(3):
    library = ctypes.CDLL(str(cpu_library.library_path()))
    assert library.fa_cpu_set_num_threads(3, None, 0) == 0
    assert len(os.listdir("/proc/self/task")) >= 3
    _ctypes.dlclose(library._handle)
    assert "libfastattention_cpu" not in open("/proc/self/maps").read()
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr


def test_the_default_is_one_thread_per_cpu_of_the_affinity_mask() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from fastattention_vllm.attention.cpu import kernels as cpu
print(cpu.num_threads())
"""
    assert _python(code).stdout == "1\n"


POOL = """
import os, time
from pathlib import Path
def text_of(path):
    try:
        return path.read_text()
    except OSError:  # a thread of an earlier pool that has just ended
        return ""
def status(field):
    # Of each pool thread, in the order in which they were started.
    tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name))
    texts = [text for task in tasks if (text := text_of(task / "status"))]
    lines = [dict(line.split(":\\t", 1) for line in text.splitlines() if ":\\t" in line) for text in texts]
    return [line[field].strip() for line in lines if line["Name"] == "fastattention"]
allowed = sorted(os.sched_getaffinity(0))
def wait_for(condition):
    # New threads get there in their own time, and on a busy machine late.
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never was")
"""


def test_each_worker_is_pinned_to_one_cpu_and_the_caller_stays_where_it_is() -> None:
    """vLLM binds a worker's main thread to its first CPU, so no pool thread may be pinned to the same one."""
    code = """
os.sched_setaffinity(0, allowed[:1])
from fastattention_vllm.attention.cpu import kernels as cpu
every, last = len(allowed), allowed[-1:]
for cpus, threads in ((allowed, every), (allowed[::-1], every), (allowed, 2 * every + 2), (last, 3)):
    cpu.set_num_threads(threads, cpus)
    expected = [str(cpus[worker % len(cpus)]) for worker in range(1, threads)]
    wait_for(lambda: status("Cpus_allowed_list") == expected)
    assert sorted(os.sched_getaffinity(0)) == allowed[:1]
"""
    done = _python(POOL + code)
    assert done.returncode == 0, done.stderr


def test_workers_of_an_unpinned_pool_may_run_where_their_creator_may() -> None:
    code = """
from fastattention_vllm.attention.cpu import kernels as cpu
cpu.set_num_threads(3)
listed = Path("/proc/self/status").read_text().split("Cpus_allowed_list:")[1].split()[0]
wait_for(lambda: status("Cpus_allowed_list") == [listed] * 2)
"""
    done = _python(POOL + code)
    assert done.returncode == 0, done.stderr


def test_the_idle_pool_sleeps_and_a_tiny_call_does_not_wake_it() -> None:
    code = """
from fastattention_vllm.attention.cpu import kernels as cpu
from tests.attention.oracle import Case
from tests.attention.cpu.test_threads import CASE
cpu.set_num_threads(4)
large, tiny = CASE.build(), Case((1,), (16,)).build()
def switches():
    return status("voluntary_ctxt_switches"), status("nonvoluntary_ctxt_switches")
def asleep():
    before = switches()
    time.sleep(0.3)
    return all(state.startswith("S") for state in status("State")) and switches() == before
cpu.run(large)
wait_for(asleep)
before = switches()
for _ in range(50):
    cpu.run(tiny)
assert all(state.startswith("S") for state in status("State"))
assert switches() == before
for _ in range(50):
    cpu.run(large)
wait_for(lambda: status("voluntary_ctxt_switches") != before[0])
"""
    done = _python(POOL + code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("count", "cpus", "message"),
    [
        (0, None, "num_threads must be between 1 and 4096, not 0."),
        (5000, None, "num_threads must be between 1 and 4096, not 5000."),
        (1, [100_000], "CPU 100000 is offline or outside this process's cpuset"),
        (1, [0, 100_000], "CPU 100000 is offline"),
        (2, [-1], "cpus contains -1, which is not a CPU number."),
        (2, [100_000], "CPU 100000 is offline or outside this process's cpuset"),
        (2, [100_000, 0], "CPU 100000 is offline"),  # the caller's CPU, to which no worker would be pinned
    ],
)
def test_impossible_pools_are_refused_and_the_old_one_stays(count: int, cpus: list[int] | None, message: str) -> None:
    cpu.set_num_threads(3)
    with pytest.raises(ValueError, match=message):
        cpu.set_num_threads(count, cpus)
    assert cpu.num_threads() == 3
    problem = Case((1, 5), (40, 50)).build()
    oracle.assert_matches(problem, *run(problem), oracle.attention(problem))
