"""The state of a pool and the plan of a step: made, read, and checked.

The clock and the forwards run past 2**31, and JAX's 64-bit types are off by default, so each is kept
as two int32 words: `epoch * 2**31 + word`, both words >= 0. `row_used` holds the low word of the
clock of a row's last selection, `row_epoch` the high one; `snapshot` puts them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_pool.config import INT32_MAX, PoolConfig, check_int

# Indices into PoolState.scalars.
CLOCK = 0
CLOCK_EPOCH = 1
FORWARDS = 2
FORWARDS_EPOCH = 3
GATE = 4
PROMOTE_LIMIT = 5
PROMOTE_INTERVAL = 6
PROMOTE_MIN_MISSES = 7
PROTECT_RECENT = 8
ERROR = 9
LAYERS = 10  # Of the config that the state was made for; no step reads it.
NUM_SCALARS = 16

# Indices into PoolState.queue, see there.
QUEUE_HEAD = 0
QUEUE_TAIL = 1
QUEUE_EPOCH = 2
QUEUE_USED = 3
QUEUE_ROW = 4
QUEUE_PASSED = 5
QUEUE_ROWS = 8
QUEUE_SIZE = 512

# Each control: its index in `scalars`, and the least and the largest value allowed.
CONTROLS = {
    "gate": (GATE, 0, 1),
    "promote_limit": (PROMOTE_LIMIT, 0, INT32_MAX),
    "promote_interval": (PROMOTE_INTERVAL, 1, INT32_MAX),
    "promote_min_misses": (PROMOTE_MIN_MISSES, 1, INT32_MAX),
    "protect_recent": (PROTECT_RECENT, 0, INT32_MAX),
}


class PoolError(RuntimeError):
    """A broken invariant of a pool's state, or a routing error that its steps recorded."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class PoolState:
    """The tables of a pool, all int32; every step updates them, in place where they are donated.

    A pytree of arrays. The queue belongs to the tables beside it: a state that is made of other
    tables, by the constructor or by `dataclasses.replace`, starts with an empty one.

    Attributes:
      key_row: [L*E] key -> bank row, -1 if the expert is not resident.
      row_key: [R+S] bank row -> key, -1 for staging rows.
      row_used: [R] clock of the row's last selection, low word.
      row_epoch: [R] the same, high word: 0 during the first 2**31 steps.
      miss_count: [L*E] misses of a key since it was last resident; stays at 2**31-1 once there.
      scalars: [16] clock, forwards, controls, error and the number of layers, at the indices named in this
        module.
      queue: [8+512] the next victims, for the fused kernel alone, which fills it from the tables when
        it is empty: head, tail, the bound (epoch, used, row), a hint of how many entries the last eviction
        passed over, and from index 8 on pool rows. All pool rows that were used before the bound (the
        lower row first, where the clock ties) stand in [head, tail), oldest first; any other row there
        was used since, and is passed over.
    """

    key_row: jax.Array
    row_key: jax.Array
    row_used: jax.Array
    row_epoch: jax.Array
    miss_count: jax.Array
    scalars: jax.Array
    queue: jax.Array = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "queue", jnp.zeros(QUEUE_ROWS + QUEUE_SIZE, jnp.int32))

    def stepped(self, **arrays: jax.Array) -> PoolState:
        """The state with some arrays replaced and the queue kept. Only for what a step or a control may
        do: rows are stamped with a clock that grows. Any other edit goes by `dataclasses.replace`."""
        old = {name: getattr(self, name) for name in STATE_FIELDS}
        return self.tree_unflatten(None, (old | arrays).values())

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(f), getattr(self, f)) for f in STATE_FIELDS], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        state = object.__new__(cls)
        for name, child in zip(STATE_FIELDS, children, strict=True):
            object.__setattr__(state, name, child)
        return state


STATE_FIELDS = tuple(field.name for field in dataclasses.fields(PoolState))


class Plan(NamedTuple):
    """What one step of one layer decided. int32; a row is a row of the bank, -1 means none.

    Attributes:
      routes: [W] bank row of each lane; -1 for padding and invalid lanes.
      safe_ids: [W] the expert ids, -1 for padding and invalid lanes.
      copy_src: [W] expert ids (host rows of this layer) to copy, promotions first, then staged ones;
        -1 from copy_count on.
      copy_dst: [W] the bank row that each is copied into.
      copy_count: [] rows to copy, promoted_count + staged_count.
      promoted_count: [] experts that got a pool row.
      staged_count: [] experts that got a staging row, for this step only.
      staged_expert: [W] the staged experts; -1 from staged_count on.
      staged_row: [W] the staging row of each.
      step_map: [E] this layer's experts -> bank row for this step, staged experts included; None
        where the config leaves it out.
    """

    routes: jax.Array
    safe_ids: jax.Array
    copy_src: jax.Array
    copy_dst: jax.Array
    copy_count: jax.Array
    promoted_count: jax.Array
    staged_count: jax.Array
    staged_expert: jax.Array
    staged_row: jax.Array
    step_map: jax.Array | None


def plan_shapes(config: PoolConfig) -> dict[str, tuple[int, ...] | None]:
    """Shapes of the plan's fields; None for a field that the config leaves out."""
    shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(Plan._fields, (config.width,))
    shapes |= dict.fromkeys(("copy_count", "promoted_count", "staged_count"), ())
    shapes["step_map"] = (config.num_experts,) if config.step_map else None
    return shapes


def state_shapes(config: PoolConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the state's arrays by field."""
    return {
        "key_row": (config.keys,),
        "row_key": (config.bank_rows,),
        "row_used": (config.rows,),
        "row_epoch": (config.rows,),
        "miss_count": (config.keys,),
        "scalars": (NUM_SCALARS,),
        "queue": (QUEUE_ROWS + QUEUE_SIZE,),
    }


def init_state(
    config: PoolConfig, residents: Sequence[Sequence[int]] | None = None
) -> PoolState:
    """Makes the state of a pool in which nothing was selected yet: gate open, every control at its
    default.

    Args:
      config: the geometry.
      residents: the expert ids that are resident at the start, one sequence a layer, as many as
        `config.layer_rows` says; by default each layer's first ones. Bank rows are given out layer
        after layer, in the order of each sequence.

    Raises:
      TypeError, ValueError: `residents` do not fit the geometry.
    """
    if not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig, got {type(config).__name__}")
    keys = _resident_keys(config, residents)
    key_row = np.full(config.keys, -1, np.int32)
    key_row[keys] = np.arange(config.rows)
    row_key = np.full(config.bank_rows, -1, np.int32)
    row_key[: config.rows] = keys
    scalars = np.zeros(NUM_SCALARS, np.int32)
    scalars[[GATE, PROMOTE_INTERVAL, PROMOTE_MIN_MISSES]] = 1
    scalars[LAYERS] = config.num_layers
    return PoolState(
        key_row=jnp.asarray(key_row),
        row_key=jnp.asarray(row_key),
        row_used=jnp.zeros(config.rows, jnp.int32),
        row_epoch=jnp.zeros(config.rows, jnp.int32),
        miss_count=jnp.zeros(config.keys, jnp.int32),
        scalars=jnp.asarray(scalars),
    )


def _resident_keys(config: PoolConfig, residents: Sequence[Sequence[int]] | None) -> np.ndarray:
    if residents is None:
        residents = [range(rows) for rows in config.layer_rows]
    if len(residents) != config.num_layers:
        raise ValueError(
            f"residents must hold {config.num_layers} sequences, one a layer, got {len(residents)}"
        )
    keys = []
    for layer, (experts, rows) in enumerate(zip(residents, config.layer_rows, strict=True)):
        if len(experts) != rows:
            raise ValueError(
                f"residents[{layer}] must hold {rows} experts, as rows_per_layer says, "
                f"got {len(experts)}"
            )
        name = f"residents[{layer}]"
        ids = [check_int(name, expert, 0, config.num_experts - 1) for expert in experts]
        if len(set(ids)) != len(ids):
            raise ValueError(f"{name} names an expert twice: {ids}")
        keys += [layer * config.num_experts + expert for expert in ids]
    return np.array(keys, np.int32)


def set_controls(
    state: PoolState,
    *,
    gate: bool | int | None = None,
    promote_limit: int | None = None,
    promote_interval: int | None = None,
    promote_min_misses: int | None = None,
    protect_recent: int | None = None,
) -> PoolState:
    """Returns the state with the given controls set; all are checked before any is written.

    Args:
      state: a pool's state; may be traced, the controls may not.
      gate: False or 0 freezes the placement, True or 1 lets promotions happen.
      promote_limit: promotions a step, 0 = no limit.
      promote_interval: promote only in forwards 1, 1+n, 1+2n, ...
      promote_min_misses: a key is promoted only from this miss on, >= 1.
      protect_recent: rows used in the last n forwards are no victims.

    Raises:
      TypeError, ValueError: a control is no int, or out of [low, 2**31-1].
    """
    given: Mapping[str, Any] = {
        "gate": int(gate) if isinstance(gate, (bool, np.bool_)) else gate,
        "promote_limit": promote_limit,
        "promote_interval": promote_interval,
        "promote_min_misses": promote_min_misses,
        "protect_recent": protect_recent,
    }
    check_is_state(state)
    values = {
        CONTROLS[name][0]: check_int(name, value, *CONTROLS[name][1:])
        for name, value in given.items()
        if value is not None
    }
    if not values:
        return state
    index = np.array(list(values), np.int32)
    scalars = jnp.asarray(state.scalars).at[index].set(np.array(list(values.values()), np.int32))
    return state.stepped(scalars=scalars)


def controls(state: PoolState) -> dict[str, int]:
    """The controls, gate included, as a dict of ints. Waits for the device."""
    check_is_state(state)
    scalars = np.asarray(state.scalars)
    return {name: int(scalars[index]) for name, (index, _, _) in CONTROLS.items()}


def clear_error(state: PoolState) -> PoolState:
    """Returns the state with the sticky routing error cleared."""
    check_is_state(state)
    return state.stepped(scalars=jnp.asarray(state.scalars).at[ERROR].set(0))


def vary_alike(tree: Any) -> Any:
    """Under `shard_map`, lets all arrays vary over each mesh axis that one of them varies over, as loops
    and kernels ask for; elsewhere returns them as they are."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    axes = frozenset().union(*varying)

    def vary(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _wide(epoch: Any, word: Any) -> Any:
    return epoch * 2**31 + word


def snapshot(config: PoolConfig, state: PoolState) -> dict[str, Any]:
    """Copies the state to the host. Waits for the device.

    Returns:
      A dict of NumPy arrays and ints named as in the state table of the planner's semantics:
      key_row, row_key, miss_count (int32), row_used (int64: the whole clock), clock, forwards, gate,
      promote_limit, promote_interval, promote_min_misses, protect_recent, error.

    Raises:
      PoolError: the state's arrays are not of this geometry.
    """
    check_geometry(config, state, PoolError)
    host = jax.device_get(state)
    scalars = [int(x) for x in host.scalars]
    return {
        "key_row": host.key_row,
        "row_key": host.row_key,
        "row_used": _wide(host.row_epoch.astype(np.int64), host.row_used),
        "miss_count": host.miss_count,
        "clock": _wide(scalars[CLOCK_EPOCH], scalars[CLOCK]),
        "forwards": _wide(scalars[FORWARDS_EPOCH], scalars[FORWARDS]),
        **controls(host),
        "error": scalars[ERROR],
    }


def check_is_state(state: Any) -> None:
    """Raises TypeError for anything but a PoolState."""
    if not isinstance(state, PoolState):
        of_pool = ": give pool.state" if type(state).__name__ == "Pool" else ""
        raise TypeError(f"state must be a PoolState, got {type(state).__name__}{of_pool}")


def check_geometry(
    config: PoolConfig, state: PoolState, error: type[Exception] = ValueError
) -> None:
    """Raises `error` where an array of the state has not the shape and dtype that `config` asks for."""
    check_is_state(state)
    for name, shape in state_shapes(config).items():
        array = getattr(state, name)
        dtype, got = getattr(array, "dtype", None), tuple(getattr(array, "shape", ()))
        if got != shape or dtype != jnp.int32:
            what = type(array).__name__ if dtype is None else f"{dtype}{list(got)}"
            raise error(f"state.{name} must be int32{list(shape)} for this config, got {what}")


def check_state(config: PoolConfig, state: PoolState) -> None:
    """Checks every invariant of a state on the host. Waits for the device.

    Raises:
      PoolError: an array is of another geometry or dtype, an invariant is broken (the message names
        the table and the first place), or a step recorded an invalid lane (see `clear_error`).
    """
    tables = snapshot(config, state)
    host = jax.device_get(state)
    if host.scalars[LAYERS] != config.num_layers:
        raise PoolError(
            f"the state was made for {host.scalars[LAYERS]} layers, the config has {config.num_layers}"
        )
    for name, (index, low, high) in CONTROLS.items():
        if not low <= host.scalars[index] <= high:
            raise PoolError(f"{name} must be in [{low}, {high}], got {host.scalars[index]}")

    def refuse(name: str, bad: np.ndarray, why: str) -> None:
        if bad.any():
            at = int(np.argmax(bad))
            raise PoolError(f"{name}[{at}] = {getattr(host, name)[at]}: {why}")

    rows, keys = config.rows, config.keys
    key_row, row_key = host.key_row, host.row_key
    refuse("key_row", (key_row < -1) | (key_row >= rows), f"not in [-1, {rows})")
    refuse("row_key", (row_key < -1) | (row_key >= keys), f"not in [-1, {keys})")
    is_staging = np.arange(config.bank_rows) >= rows
    refuse("row_key", is_staging & (row_key != -1), "a staging row is owned")
    refuse("row_key", ~is_staging & (row_key == -1), "a pool row without a key")
    refuse(
        "row_key",
        ~is_staging & (key_row[row_key] != np.arange(config.bank_rows)),
        "key_row of that key does not lead back to this row",
    )
    refuse(
        "key_row",
        (key_row != -1) & (row_key[key_row] != np.arange(keys)),
        "row_key of that row does not lead back to this key",
    )
    refuse("scalars", host.scalars[:FORWARDS_EPOCH + 1] < 0, "a word of the clock is negative")
    for name in ("row_used", "row_epoch", "miss_count"):
        refuse(name, getattr(host, name) < 0, "negative")
    clock, forwards = tables["clock"], tables["forwards"]
    refuse("row_used", tables["row_used"] > clock, f"later than the clock {clock}")
    if forwards > clock:
        raise PoolError(f"forwards = {forwards}: more than the clock {clock}")
    resident_misses = (key_row != -1) & (host.miss_count != 0)
    refuse("miss_count", resident_misses, "misses of a resident expert")
    _check_queue(config, host, tables["row_used"], clock)
    if host.scalars[ERROR] != 0:
        raise PoolError(
            "a step saw an invalid lane (an id outside [0, E) other than -1, a layer outside "
            "[0, L), or a weight that is NaN, infinite or negative) and treated it as padding; "
            "clear_error(state) forgets it"
        )


def _check_queue(config: PoolConfig, host: PoolState, row_used: np.ndarray, clock: int) -> None:
    head, tail = int(host.queue[QUEUE_HEAD]), int(host.queue[QUEUE_TAIL])
    if not 0 <= head <= tail <= QUEUE_SIZE:
        raise PoolError(f"queue: head {head}, tail {tail} are not 0 <= head <= tail <= {QUEUE_SIZE}")
    queued = host.queue[QUEUE_ROWS + head : QUEUE_ROWS + tail]
    if ((queued < 0) | (queued >= config.rows)).any():
        raise PoolError(f"queue: an entry is no pool row in [0, {config.rows})")
    words = host.queue[[QUEUE_EPOCH, QUEUE_USED, QUEUE_ROW]]
    bound = _wide(int(words[0]), int(words[1]))
    if (words < 0).any() or bound > clock or (host.row_epoch < words[0]).any():
        raise PoolError(
            f"queue: its bound {words.tolist()} is negative, later than the clock {clock}, or of a later "
            "epoch than a row"
        )
    row = np.arange(config.rows)
    is_older = (row_used < bound) | ((row_used == bound) & (row < words[2]))
    older = row[is_older]
    expected = older[np.lexsort((older, row_used[older]))]
    if not np.array_equal(queued[is_older[queued]], expected):
        raise PoolError(
            f"queue: its entries older than its bound {bound} are not the pool rows older than it, "
            "oldest first; a state made anew from the tables starts with an empty queue"
        )
