"""The passes of bench/decode.py: each decodes the routing from its first step on, by one variant.

A pass begins with a fresh bank, so that variants take turns whatever the memory, and every pass of a
variant does the same work. Its steps are called in bursts; a burst is waited for only when the next is
under way, so that the device does not wait for the host.
"""

from __future__ import annotations

import concurrent.futures
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_pool as pp
from bench import chain, decode_models, decode_profile, decode_routing
from bench.decode_micro import DEVICE_COPY_BYTES, width_of
from bench.decode_models import Carry, Forced, Params, Shape

# How the variants plan; the others have no planner.
PLANNERS = {"pool": "fused", "loop": "loop", "staging": "fused"}
VARIANTS = ("resident", *PLANNERS, "offload")
# What the variants compute is the same but for rounding: in the order of sums, and where XLA picks
# another algorithm for a matrix product.
TOLERANCE = 0.02
DEVICE_COPIES = 4  # In a row, for one to be dispatched while another runs.


class Cell(NamedTuple):
    """What a pass is a pass of.

    Attributes:
      variant: a name of VARIANTS.
      batch: sequences.
      budget: percent of the experts that have a pool row; 100 where all are resident, 0 for offload.
    """

    variant: str
    batch: int
    budget: float

    @property
    def key(self) -> dict[str, Any]:
        return {"variant": self.variant, "batch_size": self.batch, "budget": self.budget}

    @property
    def program(self) -> tuple[str, int, float]:
        """Cells with the same one share a compiled step."""
        return PLANNERS.get(self.variant, self.variant), self.batch, self.budget


class Model(NamedTuple):
    """All that the passes share.

    Attributes:
      shape: of the model.
      distinct: layers that are distinct in host memory.
      experts: by layer, in pinned host memory.
      params: dense weights.
      forced: routing of each batch, on the device.
      ids: the same on the host, [steps, L, batch, k].
      controls: of the pool, for `set_controls`; staging only has the gate closed besides.
    """

    shape: Shape
    distinct: int
    experts: tuple[Any, ...]
    params: Params
    forced: dict[int, Forced]
    ids: dict[int, np.ndarray]
    controls: dict[str, int]


class Program(NamedTuple):
    """A compiled step: (params, weights, forced, carry) -> (carry, tokens); the carry is donated."""

    call: Callable[..., tuple[Carry, jax.Array]]
    record: dict[str, Any]


class Pass(NamedTuple):
    """What a pass left: its records, the hidden states [steps, batch, d], and how many steps it ran."""

    records: list[dict[str, Any]]
    hidden: np.ndarray
    steps: int


def cells(
    variants: Sequence[str], batches: Sequence[int], budgets: Sequence[float]
) -> list[Cell]:
    """All cells, those first that are worth most should the time run out."""
    found = []
    for batch in batches:
        if "resident" in variants:
            found.append(Cell("resident", batch, 100.0))
        for budget in budgets:
            found += [Cell(v, batch, budget) for v in ("pool", "staging", "loop") if v in variants]
        if "offload" in variants:
            found.append(Cell("offload", batch, 0.0))
    return found


def pool_config(shape: Shape, lanes: int, budget: float) -> pp.PoolConfig:
    """The pool of a budget: as many rows a layer, and a staging row a lane."""
    return pp.PoolConfig(
        num_layers=shape.layers,
        num_experts=shape.experts,
        rows_per_layer=max(1, round(shape.experts * budget / 100)),
        staging_rows=lanes,
        width=width_of(lanes),
        step_map=False,
    )


def resident_config(shape: Shape, distinct: int) -> pp.PoolConfig:
    """A row for every distinct expert."""
    return pp.PoolConfig(distinct, shape.experts, shape.experts, staging_rows=1, width=1)


def config_of(shape: Shape, ids: np.ndarray, budget: float) -> pp.PoolConfig:
    return pool_config(shape, ids.shape[2] * ids.shape[3], budget)


def device_bytes(shape: Shape, distinct: int, cell: Cell, lanes: int) -> int:
    """Bytes of the bank that a pass of a cell needs."""
    if cell.variant in PLANNERS:
        return pool_config(shape, lanes, cell.budget).bank_rows * shape.expert_bytes
    if cell.variant == "resident":
        return resident_config(shape, distinct).bank_rows * shape.expert_bytes
    return shape.layers * shape.layer_bytes  # See `offload_moe`.


def _abstract(tree: Any) -> Any:
    sharding = decode_models.device_sharding()
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _leaves(shape: Shape, rows: int) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct((rows, *size), decode_models.DTYPE)
        for name, size in shape.leaves.items()
    }


def compile_step(
    shape: Shape, distinct: int, layer: Any, params: Params, forced: Forced, cell: Cell
) -> Program:
    """Compiles a cell's step with one layer's experts, so that it can go on while others are still made.
    Mere shapes would not do, for JAX takes those to be in device memory."""
    steps, _, batch, k = forced.ids.shape
    pool: Any = ()
    weights: Any = (layer,) * shape.layers
    moe_of: Callable[[Any], decode_models.Moe]
    if cell.variant in PLANNERS:
        config = pool_config(shape, batch * k, cell.budget)
        moe_of = functools.partial(decode_models.pool_moe, config, PLANNERS[cell.variant])
        state = jax.eval_shape(lambda: pp.init_state(config))
        pool = _abstract(pp.Pool(state, _leaves(shape, config.bank_rows), None))
    elif cell.variant == "resident":
        moe_of = functools.partial(decode_models.resident_moe, shape, distinct)
        weights = _abstract(_leaves(shape, resident_config(shape, distinct).bank_rows))
    else:
        moe_of = decode_models.offload_moe

    def step(params, weights, forced, carry):
        return decode_models.decode_step(shape, moe_of(weights), params, forced, carry)

    carry = _abstract(jax.eval_shape(functools.partial(decode_models.make_carry, forced), pool))
    carry = carry._replace(pool=pool)
    begin = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=3).lower(params, weights, forced, carry)
    lowering = time.perf_counter() - begin
    launches: dict[str, int] = {}
    if cell.variant == "pool":
        with tempfile.TemporaryDirectory() as folder:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
            dumps = [path.read_text() for path in Path(folder).glob(f"*jit_step{chain.DUMP}")]
        launches = dict(Counter(chain.LAUNCH.findall("\n".join(dumps))))
    else:
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    record = {
        "kind": "program",
        **cell.key,
        "steps": steps,
        "launches": launches,
        "lower_seconds": round(lowering, 2),
        "compile_seconds": round(time.perf_counter() - begin - lowering, 2),
    }
    for name in ("argument", "output", "temp", "alias"):
        record[f"{name}_bytes"] = getattr(memory, f"{name}_size_in_bytes", None)
    return Program(compiled, record)


def compile_all(
    shape: Shape,
    distinct: int,
    layer: Any,
    params: Params,
    forced: dict[int, Forced],
    wanted: Sequence[Cell],
    executor: concurrent.futures.Executor,
) -> dict[tuple[str, int, float], concurrent.futures.Future[Program]]:
    """Starts to compile the programs of all cells, in their order."""
    started = {}
    for cell in wanted:
        if cell.program not in started:
            arguments = shape, distinct, layer, params, forced[cell.batch], cell
            started[cell.program] = executor.submit(compile_step, *arguments)
    return started


def first_state(
    config: pp.PoolConfig, cell: Cell, controls: dict[str, int], state: pp.PoolState | None = None
) -> pp.PoolState:
    """The state that a pass starts with: by default each layer's first experts are resident. With staging
    only the gate is closed, and so they stay."""
    state = pp.init_state(config) if state is None else jax.tree.map(jnp.copy, state)
    return pp.set_controls(state, **controls, gate=cell.variant != "staging")


def begin(
    model: Model, cell: Cell, state: pp.PoolState | None = None, step: int = 0
) -> tuple[Any, Carry]:
    """What a pass needs on the device: the weights that its step takes, and the carry.

    Args:
      model: what passes share.
      cell: the pass's.
      state: of the pool before `step`; by default that before the first.
      step: to begin with.
    """
    shape, forced = model.shape, model.forced[cell.batch]
    pool: Any = ()
    weights: Any = model.experts
    if cell.variant in PLANNERS:
        config = config_of(shape, model.ids[cell.batch], cell.budget)
        state = first_state(config, cell, model.controls, state)
        pool = pp.Pool(state, pp.init_bank(config, model.experts, state), None)
    elif cell.variant == "resident":
        config = resident_config(shape, model.distinct)
        weights = pp.init_bank(config, model.experts[: model.distinct])
    carry = decode_models.make_carry(forced, pool, step)
    return jax.block_until_ready((weights, carry))


def free(weights: Any, carry: Carry, model: Model) -> None:
    """Gives back the memory of a pass at once; the model's own arrays stay."""
    for leaf in jax.tree.leaves(carry):
        leaf.delete()
    if weights is not model.experts:
        for leaf in jax.tree.leaves(weights):
            leaf.delete()


def plain_copies(model: Model, count: int) -> Iterator[dict[str, Any]]:
    """Times plain pinned copies to the device, of a whole layer each."""
    layer, device = model.experts[0], decode_models.device_sharding()
    for i in range(count + 1):
        begun = time.perf_counter()
        moved = jax.block_until_ready(jax.device_put(layer, device))
        seconds = time.perf_counter() - begun
        for leaf in jax.tree.leaves(moved):
            leaf.delete()
        if i:  # The first allocates.
            yield {"kind": "plain", "bytes": model.shape.layer_bytes, "seconds": seconds}


def device_copies(count: int, device_bytes: int = DEVICE_COPY_BYTES) -> Iterator[dict[str, Any]]:
    """Times copies of an array of some bytes on the device; their bytes are those read and those written."""
    array, copy = jnp.zeros(device_bytes // 4, jnp.int32), jax.jit(jnp.copy)
    copy(array).block_until_ready()
    for _ in range(count):
        begun = time.perf_counter()
        jax.block_until_ready([copy(array) for _ in range(DEVICE_COPIES)])
        seconds = time.perf_counter() - begun
        yield {"kind": "device_copy", "bytes": DEVICE_COPIES * 2 * array.nbytes, "seconds": seconds}


def bursts_of(first: int, steps: int, warm_up: int, burst: int) -> list[tuple[int, int]]:
    """(first step, steps) of each burst; none has steps before and after the warm-up."""
    found = []
    while first < steps:
        end = min(first + burst, warm_up if first < warm_up else steps, steps)
        found.append((first, end - first))
        first = end
    return found


def run_pass(
    model: Model,
    program: Program,
    cell: Cell,
    steps: int,
    warm_up: int,
    burst: int,
    expected: pp.PoolState | None = None,
) -> Pass:
    """Decodes steps 0 to `steps`, and returns a record a burst.

    Raises:
      AssertionError: the pool did not end in the state `expected`.
    """
    begun = time.perf_counter()
    weights, carry = begin(model, cell)
    made = time.perf_counter() - begun
    params, forced = model.params, model.forced[cell.batch]
    waiting: list[tuple[int, int, jax.Array]] = []
    records = []
    last = time.perf_counter()

    def wait() -> None:
        nonlocal last
        first, count, token = waiting.pop(0)
        token.block_until_ready()
        now = time.perf_counter()
        records.append({"first": first, "steps": count, "seconds": now - last})
        last = now

    for first, count in bursts_of(0, steps, warm_up, burst):
        for _ in range(count):
            carry, token = program.call(params, weights, forced, carry)
        waiting.append((first, count, token))
        if len(waiting) > 1:
            wait()
    wait()
    hidden = np.asarray(carry.hidden)
    if expected is not None:
        config = config_of(model.shape, model.ids[cell.batch], cell.budget)
        check_state(config, carry.pool.state, expected, cell)
    free(weights, carry, model)
    for record in records:
        record["warm_up"] = record["first"] < warm_up
    return Pass([*records, {"init_seconds": made}], hidden, steps)


def check_state(
    config: pp.PoolConfig, state: pp.PoolState, expected: pp.PoolState, cell: Cell
) -> None:
    """Compares all tables with those of the planner alone.

    Raises:
      AssertionError: they differ.
    """
    pp.check_state(config, state)
    got, want = pp.snapshot(config, state), pp.snapshot(config, expected)
    wrong = [name for name in want if not np.array_equal(got[name], want[name])]
    if wrong:
        raise AssertionError(f"{cell}: {', '.join(wrong)} differ from those of the planner alone")


def compare(hidden: np.ndarray, against: np.ndarray, steps: int) -> dict[str, Any]:
    """How far the hidden states of the first steps are from each other, the worst step and sequence."""
    a, b = hidden[:steps].astype(np.float64), against[:steps].astype(np.float64)
    error = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)
    worst = float(error.max()) if np.isfinite(a).all() and np.isfinite(b).all() else float("inf")
    return {
        "steps": steps,
        "equal": bool(np.array_equal(hidden[:steps], against[:steps])),
        "largest_relative_error": worst,
    }


def check_close(record: dict[str, Any]) -> None:
    """Raises AssertionError where a comparison is out of bounds."""
    if not record["largest_relative_error"] <= TOLERANCE:
        raise AssertionError(f"outputs differ: {record}")


def profile_cell(
    model: Model, program: Program, cell: Cell, state: pp.PoolState | None, first: int, steps: int
) -> dict[str, Any]:
    """The kernels of some steps, from step `first` on, where the pool is in `state`."""
    made: list[tuple[Any, Carry]] = []

    def let_go() -> None:
        while made:
            free(*made.pop(), model)

    def prepare() -> Callable[[], Any]:
        let_go()
        made.append(begin(model, cell, state, first))

        def run() -> Any:
            weights, carry = made.pop()
            for _ in range(steps):
                carry, token = program.call(
                    model.params, weights, model.forced[cell.batch], carry
                )
            made.append((weights, carry))
            return token

        return run

    layers = steps * model.shape.layers
    expected = {"ffn": 2 * layers}
    if cell.variant in PLANNERS:
        expected |= {"planner": layers, "copies": layers}
    key = {**cell.key, "first": first, "steps": steps}
    try:
        name, launches = decode_profile.profile(prepare, expected)
    except decode_profile.NoProfile as error:
        return {"kind": "left_out", "what": f"profile of {key}", "why": str(error)}
    finally:
        let_go()
    parts = {part: decode_profile.durations(launches, part) for part in decode_profile.PARTS}
    rest = decode_profile.durations(launches, decode_profile.REST)
    return {
        "kind": "profile",
        **key,
        "profiler": name,
        **{f"{part}_us": times for part, times in parts.items()},
        "rest_us_total": round(sum(rest), 3),
        "by_name": decode_profile.by_name(launches),
    }


def compile_loaders(
    shape: Shape, distinct: int, layer: Any, ids: dict[int, np.ndarray], wanted: Sequence[Cell]
) -> None:
    """Makes each bank once, of one layer's experts, so that what loads a bank is compiled before others
    wait for it."""
    made = set()
    for cell in wanted:
        if cell.variant in PLANNERS:
            config, layers = config_of(shape, ids[cell.batch], cell.budget), shape.layers
        elif cell.variant == "resident":
            config, layers = resident_config(shape, distinct), distinct
        else:
            continue
        if config not in made:
            made.add(config)
            bank = jax.block_until_ready(pp.init_bank(config, (layer,) * layers))
            for leaf in jax.tree.leaves(bank):
                leaf.delete()


def play_all(
    shape: Shape,
    ids: dict[int, np.ndarray],
    warm_up: dict[int, int],
    wanted: Sequence[Cell],
    controls: dict[str, int],
    executor: concurrent.futures.Executor,
) -> dict[Cell, concurrent.futures.Future[decode_routing.Played]]:
    """Starts to play the steps of each cell that has a planner through the planner alone, with the state
    after the warm-up. The kernels plan alike, so the loop planner's are the pool's."""
    known: dict[Any, Any] = {}
    found = {}
    for cell in wanted:
        if cell.variant not in PLANNERS:
            continue
        name = cell.variant == "staging", cell.batch, cell.budget
        if name not in known:
            own = ids[cell.batch]
            config = config_of(shape, own, cell.budget)
            arguments = config, first_state(config, cell, controls), own, warm_up[cell.batch]
            known[name] = executor.submit(decode_routing.play, *arguments)
        found[cell] = known[name]
    return found
