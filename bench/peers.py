"""Times flashlib's `lru_ensure` beside the fused kernel: `python bench/peers.py`.

The cells are those of bench/sweep.py, and so are the flags. Both planners start from one settled state,
get the same ids, run the same number of steps in one CUDA graph, and take turns in one process. It
needs PyTorch and the package flashlib, which needs Triton.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Both frameworks share the GPU's memory. Before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

if not __package__:  # Run as a script: import the checkout that it stands in, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from absl import app, flags

import pallas_pool as pp
from bench import cases, sweep, table, timing

RECORDS = "peers.jsonl"
PEER = "flashlib"
NEEDED = ("torch", "triton", "flashlib")
KERNEL = "lru_ensure"  # Part of the names of flashlib's kernels.

COMPUTES = {
    PEER: (
        "`lru_ensure` makes every selected expert resident, evicting the least recently used rows, and "
        "gives each lane its row and the list of copies. It has no gate, no promotion limit, interval "
        "or least number of misses, no protected rows, no staging rows, no miss counts, no checks of "
        "ids or weights, and no step map. Its state is int32 here, the faster of the two that it takes."
    ),
    "fused": (
        "`pallas_pool.step` plans the same and all that flashlib leaves out: controls, staging, miss "
        "counts, checks of the ids, a clock that does not wrap, a plan whose unused entries are -1, and "
        "with --step_map the step map."
    ),
}


class Problem(NamedTuple):
    """A cell for flashlib, in NumPy arrays, so that it can be handed to another process.

    Attributes:
      tables: `lru_ensure`'s state arguments by name, in the steady state.
      ids: [turns + forwards - 1, L, W]: the circle, and its head again, so that any `forwards` of it
        lie in one piece.
      turns: of the circle.
      turn: the first one to run.
      forwards: in one graph.
      experts: of a layer.
      promoted: misses of every step.
      strategy: for `lru_ensure`, or None.
    """

    tables: dict[str, np.ndarray]
    ids: np.ndarray
    turns: int
    turn: int
    forwards: int
    experts: int
    promoted: int
    strategy: str | None


def make_problem(
    config: pp.PoolConfig,
    case: cases.Case,
    snapshot: dict[str, Any],
    turn: int,
    forwards: int,
    strategy: str | None = None,
) -> Problem:
    """A cell for flashlib from a snapshot of the pool before turn `turn`. Its maps are ours: id
    `layer * E + expert` to row, row to id, and the step at which a row was last used."""
    ids = case.ids[np.arange(case.turns + forwards - 1) % case.turns]
    tables = {
        "slot_of_id": snapshot["key_row"],
        "id_of_slot": snapshot["row_key"][: config.rows],
        "lru_usage": snapshot["row_used"],
        "lru_step": np.array(snapshot["clock"]),
    }
    if tables["lru_step"] >= np.iinfo(np.int32).max // 2:
        raise ValueError(f"clock {snapshot['clock']} is too late for int32")
    return Problem(
        tables={name: np.array(each, np.int32) for name, each in tables.items()},
        ids=np.ascontiguousarray(ids),
        turns=case.turns,
        turn=turn,
        forwards=forwards,
        experts=config.num_experts,
        promoted=case.promoted,
        strategy=strategy,
    )


class Peer:
    """flashlib on a problem."""

    def __init__(self, problem: Problem, device: str = "cuda"):
        import torch
        from flashlib.kernels.slot_cache import lru_ensure

        self._torch, self._lru_ensure, self._problem = torch, lru_ensure, problem
        self._turn = problem.turn
        _, self._layers, width = problem.ids.shape
        self._ids = torch.from_numpy(problem.ids).to(device)
        self._query = torch.empty_like(self._ids[: problem.forwards])
        self._tables = {
            name: torch.from_numpy(table).to(device) for name, table in problem.tables.items()
        }
        # One number a step, each at an address of 16 bytes' alignment: Triton compiles for that.
        steps = problem.forwards * self._layers
        self._copies = torch.zeros((steps, 2), dtype=torch.int64, device=device)
        self._out, self._src, self._dst = torch.zeros((3, width), dtype=torch.int32, device=device)
        self._graph: Any = None

    def capture(self) -> None:
        """Compiles the kernel, and captures one call's steps as a CUDA graph."""
        torch = self._torch
        before = {name: table.clone() for name, table in self._tables.items()}
        self._query.copy_(self._ids[self._turn : self._turn + len(self._query)])
        self._step(0, 0)
        torch.cuda.synchronize()
        for name, table_before in before.items():
            self._tables[name].copy_(table_before)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._steps()
        torch.cuda.synchronize()

    def call(self) -> None:
        """Runs `forwards` forwards: one copy of their ids, then the graph, where it was captured."""
        self._query.copy_(self._ids[self._turn : self._turn + len(self._query)])
        if self._graph is None:
            self._steps()
        else:
            self._graph.replay()
        self._turn = (self._turn + len(self._query)) % self._problem.turns

    def wait(self) -> None:
        self._torch.cuda.synchronize()

    def check_counts(self) -> int:
        """Returns the steps of the last call.

        Raises:
          AssertionError: one of them had another number of misses than the problem states.
        """
        copies = self._copies[:, 0].cpu().numpy()
        wrong = np.flatnonzero(copies != self._problem.promoted)
        if len(wrong):
            raise AssertionError(
                f"{PEER}: step {wrong[0]} of a call copied {copies[wrong[0]]} experts, not "
                f"{self._problem.promoted}; so in {len(wrong)} of {len(copies)} steps"
            )
        return len(copies)

    def check_circle(self) -> int:
        """Calls once round the circle, and checks every step's count; returns the steps."""
        calls = -(-self._problem.turns // self._problem.forwards)
        steps = 0
        for _ in range(calls):
            self.call()
            steps += self.check_counts()
        return steps

    def _steps(self) -> None:
        for forward in range(len(self._query)):
            for layer in range(self._layers):
                self._step(forward, layer)

    def _step(self, forward: int, layer: int) -> None:
        self._lru_ensure(
            self._query[forward, layer],
            **self._tables,
            out_indices=self._out,
            src_indices=self._src,
            dst_indices=self._dst,
            num_copy=self._copies[forward * self._layers + layer, 0],
            id_base=layer * self._problem.experts,
            strategy=self._problem.strategy,
        )


def peer_durations(problem: Problem, turns: int) -> list[float]:
    """Microseconds of every step of at least `turns` forwards, by CUPTI through PyTorch's profiler."""
    import torch

    peer = Peer(problem)
    peer.capture()
    calls = -(-turns // problem.forwards)
    peer.call()
    peer.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            peer.call()
        peer.wait()
    times = [
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if KERNEL in event.name and event.device_type == torch.autograd.DeviceType.CUDA
    ]
    steps = calls * problem.forwards * problem.ids.shape[1]
    if len(times) != steps:
        seen = sorted({event.name for event in profiler.events()})
        raise RuntimeError(f"CUPTI saw {len(times)} launches in {steps} steps, among {seen[:20]}")
    return [round(elapsed, 3) for _, elapsed in sorted(times)]


class Runner(NamedTuple):
    """Something to be timed: `call` puts a call in flight, `wait` waits for all of them."""

    call: Callable[[], None]
    wait: Callable[[], None]


def take_turns(
    runners: dict[str, Runner], efforts: dict[str, timing.Effort]
) -> Iterator[dict[str, Any]]:
    """Yields one record a batch. In every round each runner that has batches left has one, and each
    round begins with another."""
    for batch in range(max(effort.batches for effort in efforts.values())):
        names = [name for name in runners if batch < efforts[name].batches]
        first = batch % len(names)
        for order, name in enumerate(names[first:] + names[:first]):
            begin = time.perf_counter()
            for _ in range(efforts[name].replays):
                runners[name].call()
            runners[name].wait()
            yield {
                "implementation": name,
                "batch": batch,
                "order": order,
                "seconds": time.perf_counter() - begin,
                "replays": efforts[name].replays,
            }


def time_cell(
    prepared: sweep.Prepared, cell: sweep.Cell, problem: Problem, wanted: sweep.Options
) -> Iterator[dict[str, Any]]:
    """Yields a record a batch of all kernels and of flashlib, and one of the checks.

    Raises:
      AssertionError: a state or a count is wrong.
    """
    config, chains = prepared.point.config, prepared.chains
    carries, seconds = sweep.warm_up(config, cell, chains)
    timing.check_same_state(config, cell.case, carries)

    def runner(name: str) -> Runner:
        def call() -> None:
            carries[name] = chains[name].call(carries[name], cell.stream)

        return Runner(call, lambda: jax.block_until_ready(carries[name]))

    peer = Peer(problem)
    peer.capture()
    counted = peer.check_circle()
    peer.wait()
    begin = time.perf_counter()
    peer.call()
    peer.wait()
    seconds[PEER] = time.perf_counter() - begin
    runners = {name: runner(name) for name in chains} | {PEER: Runner(peer.call, peer.wait)}
    efforts = {name: sweep.effort(each, wanted) for name, each in seconds.items()}
    steps = config.num_layers * wanted.forwards
    for record in take_turns(runners, efforts):
        yield {"kind": "batch"} | cell.key | record | {"steps": steps * record["replays"]}
    counted += peer.check_counts()
    calls = {name: efforts[name].batches * efforts[name].replays for name in chains}
    checks = sweep.check_record(prepared, cell, carries, calls)
    yield checks | {"peer_counted_steps": counted}


def time_all(wanted: sweep.Options, strategy: str | None) -> Iterator[dict[str, Any]]:
    """Times every cell, and yields the records."""
    for name, text in COMPUTES.items():
        yield {"kind": "computes", "implementation": name, "text": text}
    prepared = sweep.prepare_all(wanted)
    work = [(each, cell) for each in prepared for cell in each.cells]
    problems = []
    for each in prepared:
        yield from sweep.chain_records(each, wanted)
    for each, cell in work:
        config = each.point.config
        snapshot, turn = pp.snapshot(config, cell.settled.state), int(cell.settled.turn)
        arguments = config, cell.case, snapshot, turn, wanted.forwards, strategy
        problems.append(make_problem(*arguments))
        yield from time_cell(each, cell, problems[-1], wanted)
    if not wanted.profile_turns:
        return
    # Last, so that no replay is timed in a process that CUPTI has touched; and flashlib's in a process
    # of its own: JAX and PyTorch may each bring a CUPTI, and only one may listen.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for (each, cell), problem in zip(work, problems, strict=True):
            for kernel in wanted.kernels:
                yield sweep.kernel_record(each.point, cell, kernel, wanted)
            yield peer_record(pool, cell, problem, wanted.scan_turns)


def peer_record(
    pool: concurrent.futures.Executor, cell: sweep.Cell, problem: Problem, turns: int
) -> dict[str, Any]:
    """flashlib's durations, or why there are none."""
    key = cell.key | {"implementation": PEER}
    try:
        times = pool.submit(peer_durations, problem, turns).result()
    except Exception as error:  # Whatever it is, the other figures stand without these.
        return {"kind": "missing", **key, "why": f"{type(error).__name__}: {error}"}
    return {"kind": "kernel", **key, "microseconds": times}


def main(argv: Sequence[str]) -> None:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        sweep.refuse(
            f"bench/peers.py times flashlib's lru_ensure: {' and '.join(absent)} not installed. "
            "It needs PyTorch for CUDA and flashlib: pip install torch flashlib"
        )
    versions = {name: importlib.metadata.version(name) for name in NEEDED}
    folder = sweep.begin("bench/peers.py", argv, [*sweep.Options._fields, "strategy"], versions)
    records = sweep.write(folder / RECORDS, time_all(sweep.options(), flags.FLAGS.strategy))
    print(table.sweep_terminal_table(table.summarize_sweep(records)))
    print("\n".join(table.graph_notes(records)))
    print("\n".join(f"{name}: {text}" for name, text in COMPUTES.items()))
    missing = [record["why"] for record in records if record["kind"] == "missing"]
    if missing:
        print(f"No durations of {PEER} in {len(missing)} cells: {missing[0]}")
    print(f"Results: {folder}")


def define_flags() -> None:
    """The sweep's flags, and one more."""
    sweep.define_flags()
    flags.FLAGS.set_default("kernels", ["fused"])
    flags.adopt_module_key_flags(sweep)
    flags.DEFINE_enum("strategy", None, ["seq", "insert"], "of flashlib; by default it chooses")


if __name__ == "__main__":
    define_flags()
    app.run(main)
