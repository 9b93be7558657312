"""The victim queue of the fused kernel: the oldest rows of the pool, oldest first.

Why a queue is exact: a row's clock only ever grows, to at least the clock of the step that filled the
queue. The queue holds *all* rows older than a bound that is no later than that clock. So a row older
than the bound was not used since, all such rows stand in the queue, in their order, and any row
outside it is younger. A row is live while it is older than the bound; an entry that was used since,
by whichever kernel, is passed over. Ties go by the row: a bound is (epoch, used, row).

A refill reads the pool once, whatever its size, and has three parts:
1. of a sample of rows spread over the pool it finds, by bisection, a bound that a few hundred rows of
   the pool lie below;
2. it marks the rows below that bound, one bit a row, and then writes out the marked rows, which are
   few. If more lie below than the queue holds, those written are the next sample, and the bound
   shrinks;
3. it sorts them by counting, for each, how many come before.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_pool import state as s
from pallas_pool.config import INT32_MAX, PoolConfig
from pallas_pool.kernels import ages
from pallas_pool.kernels import clock as ck
from pallas_pool.kernels import lanes as ln
from pallas_pool.state import PoolState

# Rows of the sample: one in so many of the pool, within bounds. The queue then gets hundreds of rows
# from any pool, and a sample fits in registers up to 200,000 rows.
SAMPLE_STRIDE = 24
LEAST_SAMPLE = 2048
MOST_SAMPLE = 8192
HASH = -1640531527  # 2**32 over the golden ratio: Knuth's multiplicative hash.
# Columns of a tile of the pool, and tiles that are loaded before the first is looked at.
COLUMNS = 1024
TILES_AHEAD = 4
TILES_AHEAD_TIES = 2  # Where rows are judged by more than their word, which takes more registers.
# Tiles that share a word of marks, and words that are looked at together.
WORD_BITS = 32
WORDS = 2048
# Queue entries that are looked at together, where the step has fewer lanes.
MIN_WINDOW = 32
# Entries that a round of the sort compares with all others.
SORT_TILE = 32


class Queue(NamedTuple):
    """The queue's scalars: live entries lie in [head, tail); the bound of those that count as live."""

    head: jax.Array
    tail: jax.Array
    epoch: jax.Array
    used: jax.Array
    row: jax.Array


def read_queue(state: PoolState) -> Queue:
    return Queue(*(state.queue[i] for i in range(s.QUEUE_HEAD, s.QUEUE_ROW + 1)))


class Window(NamedTuple):
    """The entries at the head of the queue, as many as are looked at together. Vectors."""

    row: jax.Array
    epoch: jax.Array
    used: jax.Array
    key: jax.Array


def _inside(config: PoolConfig, queue: Queue) -> tuple[jax.Array, jax.Array]:
    """Each place of the window, and whether the queue has so many entries."""
    place = ln.lane_ids(max(config.width, MIN_WINDOW))
    return place, queue.head + place < queue.tail


def load_rows(call: ln.Call, queue: Queue) -> jax.Array:
    """Loads the rows of the window."""
    place, inside = _inside(call.config, queue)
    return ln.load(call.state.queue, s.QUEUE_ROWS + queue.head + place, inside, 0)


def load_window(call: ln.Call, clock: ck.Clock, queue: Queue, row: jax.Array) -> Window:
    """Loads what a step must know of the rows from `load_rows`. A barrier must stand between the
    stamps of the hits and this."""
    _, inside = _inside(call.config, queue)
    return Window(
        row=row,
        epoch=ages.load_epoch(call, clock, row, inside),
        used=ln.load(call.state.row_used, row, inside, 0),
        key=ln.load(call.state.row_key, row, inside, -1),
    )


def scratch_words(config: PoolConfig) -> int:
    """A refill's rows before they are sorted, then their sort keys, or before that the marks."""
    return s.QUEUE_SIZE + max(s.QUEUE_SIZE, _mark_groups(config) * _columns(config))


def _sampled(config: PoolConfig) -> int:
    """Rows of the sample, a power of two; all, if the pool has no more."""
    sampled = ln.next_power_of_two(-(-config.rows // SAMPLE_STRIDE))
    sampled = min(max(sampled, LEAST_SAMPLE), MOST_SAMPLE)
    return min(sampled, ln.next_power_of_two(config.rows))


def _columns(config: PoolConfig) -> int:
    return min(COLUMNS, ln.next_power_of_two(config.rows))


def _mark_groups(config: PoolConfig) -> int:
    """Groups of tiles that share their words of marks."""
    return -(-config.rows // (_columns(config) * WORD_BITS))


def _share(sampled: int, rows: int) -> int:
    """How much of the sample should lie below a bound: so much that what lies below in the pool fits
    in the queue, the sample's error (2.5 times its standard deviation) included."""
    share = s.QUEUE_SIZE if sampled == rows else 1
    while (share + 1 + 2.5 * (share + 1) ** 0.5) * rows <= s.QUEUE_SIZE * sampled:
        share += 1
    return share


def _below(used: jax.Array, row: jax.Array, bound_used: jax.Array, bound_row: jax.Array):
    """(used, row) < (bound_used, bound_row), lane by lane."""
    return used <= bound_used - (row >= bound_row).astype(jnp.int32)


def evict(
    call: ln.Call,
    base: jax.Array,
    clock: ck.Clock,
    rules: ln.Rules,
    queue: Queue,
    window: Window,
    wanted: jax.Array,
) -> jax.Array:
    """Evicts the `wanted` oldest rows that may be victims, or as many as the rules let go.

    Their keys lose them, in the step map too where they are of the layer whose first key is `base`, and
    they get this step's clock. The rows stand in plan.copy_dst from its head on, and all warps see them.
    `window` is that of `queue`; the caller must have put a barrier behind the stamps of the hits.

    Returns:
      The number of rows evicted.
    """
    config, state, plan = call.config, call.state, call.plan
    need = jnp.minimum(wanted, rules.limit)

    def take_some(carry):
        taken, _, is_loaded, queue = carry
        is_loaded = is_loaded * (queue.head < queue.tail).astype(jnp.int32)
        queue = lax.cond(
            queue.head == queue.tail,
            lambda: _refill(call, clock),
            lambda: Queue(*(x + 0 for x in queue)),
        )
        place, inside = _inside(config, queue)
        row, epoch, used, key = lax.cond(
            is_loaded != 0,
            lambda: Window(*(x + 0 for x in window)),
            lambda: load_window(call, clock, queue, load_rows(call, queue)),
        )
        live = inside & (epoch == queue.epoch) & _below(used, row, queue.used, queue.row)
        may_go = live & ck.before((epoch, used), rules.horizon)
        count = may_go.astype(jnp.int32)
        rank = lax.cumsum(count) - count
        take = may_go & (rank < need - taken)
        # The head moves to the first live entry that stays, past what is taken or was used since.
        stays = jnp.min(jnp.where(live & ~take, place, place.shape[0]))
        some = jnp.minimum(jnp.sum(count, dtype=jnp.int32), need - taken)
        # row_used, row_epoch and row_key were loaded above, by all warps; now they may be stored.
        call.barrier()
        ln.store(plan.copy_dst, taken + rank, row, take)
        ln.store(state.row_used, row, clock[1], take)
        ln.store(state.row_epoch, row, clock[0], take & (clock[0] > 0))
        ln.store(state.key_row, key, -1, take)
        if plan.step_map is not None:
            expert = key - base
            here = take & (expert >= 0) & (expert < config.num_experts)
            ln.store(plan.step_map, expert, -1, here)
        # The next round loads row_used and row_epoch, the caller copy_dst.
        call.barrier()
        taken = taken + some
        empty = queue.head == queue.tail
        # A live entry that stays though more are needed is too young, and so are all behind it.
        more = (taken < need) & ~empty & (stays == place.shape[0])
        head = jnp.minimum(queue.head + stays, queue.tail)
        return taken, more, zero, queue._replace(head=head)

    zero = need - need
    taken, _, _, queue_after = lax.while_loop(
        lambda carry: carry[1], take_some, (zero, need > 0, zero + 1, queue)
    )
    for i, value in zip(range(s.QUEUE_HEAD, s.QUEUE_ROW + 1), queue_after, strict=True):
        state.queue[i] = value
    return taken


def _refill(call: ln.Call, clock: ck.Clock) -> Queue:
    """Fills the queue with the oldest rows of the pool, of those older than this step.

    Returns:
      The new queue; empty if there is no such row.
    """
    config, state, scratch, size = call.config, call.state, call.scratch, s.QUEUE_SIZE
    sampled = _sampled(config)
    columns = _columns(config)
    epoch = ages.oldest_epoch(call, clock, sampled)
    zero = epoch - epoch
    rows = zero + config.rows  # A select between two literals would lower to one of booleans.
    is_current = epoch == clock[0]
    # The bound that all rows of this epoch, older than this step, lie below.
    last_used = jnp.where(is_current, clock[1], INT32_MAX)
    last_row = jnp.where(is_current, zero, rows)

    def choose_bound(count):
        """A bound from the sample: of the whole pool, or of the rows collected last, if too many."""
        lane = ln.lane_ids(sampled)
        too_many = count > size
        row = ln.load(scratch, lane, too_many & (lane < size), 0)
        # One row of each stratum of the pool, lane * rows / sampled without leaving int32, at a hashed
        # place: rows of one age may stand at a regular distance, a layer's share of the pool.
        stratum = config.rows // sampled
        spread = lane * stratum + lane * (config.rows % sampled) // sampled
        hashed = lax.shift_right_logical(lane * HASH, jnp.int32(16))
        spread = spread + ((hashed * stratum) >> 16)
        row = jnp.where(too_many, row, spread)
        inside = jnp.where(too_many, lane < size, row < config.rows)
        row_epoch = ages.load_epoch(call, clock, row, inside)
        used = ln.load(state.row_used, row, inside, INT32_MAX)
        counts = inside & (row_epoch == epoch) & _below(used, row, last_used, last_row)
        # Of too many collected rows, half of what the queue holds.
        of_collected = jnp.maximum(1, size * size // 2 // jnp.maximum(count, 1))
        share = jnp.where(too_many, of_collected, _share(min(sampled, config.rows), config.rows))
        return _quantile(used, row, counts, share, (last_used, last_row), rows)

    def mark(bound):
        """Marks the rows below the bound: bit b of word [group, column] for tile 32 * group + b."""
        is_plain = (bound[1] == 0) & (clock[0] == 0)

        @pl.when(is_plain)  # No rows of the bound's own word, and no epochs: the usual case.
        def _():
            mark_where(lambda used, row, inside: used < bound[0], TILES_AHEAD)

        @pl.when(~is_plain)
        def _():
            def is_below(used, row, inside):
                row_epoch = ages.load_epoch(call, clock, row, inside)
                return (row_epoch == epoch) & _below(used, row, *bound)

            mark_where(is_below, TILES_AHEAD_TIES)

    def mark_where(is_below, tiles_ahead):
        tiles = ages.tiles(config, columns)
        ahead = min(tiles_ahead, ln.next_power_of_two(tiles))
        column = ln.lane_ids(columns)
        tile = ln.lane_ids(ahead)[:, None]

        def load_batch(i):
            row = (i * ahead + tile) * columns + column[None, :]
            return ln.load(state.row_used, row, row < config.rows, INT32_MAX), row

        def look(i, carry):
            word, used, row = carry
            following = load_batch(i + 1)
            marks = is_below(used, row, row < config.rows).astype(jnp.int32) << tile
            group, bit = i * ahead // WORD_BITS, i * ahead % WORD_BITS
            word = jnp.where(bit == 0, 0, word) | (jnp.sum(marks, 0, jnp.int32) << bit)
            # Stored with each batch; the group's last one has all its marks.
            ln.store(scratch, size + group * columns + column, word, column >= 0)
            return word, *following

        batches = -(-tiles // ahead)
        lax.fori_loop(
            jnp.int32(0), jnp.int32(batches), look, (column - column, *load_batch(zero))
        )

    def write_marked():
        """Writes the marked rows to scratch, as many as fit; returns how many there are."""
        words = _mark_groups(config) * columns
        tile = min(WORDS, ln.next_power_of_two(words))

        def write_tile(i, found):
            at = i * tile + ln.lane_ids(tile)
            word = ln.load(scratch, size + at, at < words, 0)
            first_tile, column = at // columns * WORD_BITS, at % columns
            ones = lax.population_count(word)
            place = found + lax.cumsum(ones) - ones

            def write_lowest(_, carry):
                word, place = carry
                bit = lax.population_count((word & -word) - 1)
                row = (first_tile + bit) * columns + column
                ln.store(scratch, place, row, (word != 0) & (place < size))
                return word & (word - 1), place + 1

            lax.fori_loop(jnp.int32(0), jnp.max(ones), write_lowest, (word, place))
            return found + jnp.sum(ones, dtype=jnp.int32)

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-words // tile)), write_tile, zero)

    def attempt(carry):
        bound = choose_bound(carry[0])
        mark(bound)
        # The marks are loaded below. choose_bound may have loaded rows from scratch, now stored to.
        call.barrier()
        count = write_marked()
        # What was collected is loaded by the next attempt, or by the sort.
        call.barrier()
        return count, bound

    count, bound = lax.while_loop(
        lambda carry: (carry[0] < 0) | (carry[0] > size),
        attempt,
        (zero - 1, (last_used, last_row)),
    )
    return _sort(call, zero, count, epoch, bound)


def _quantile(used, row, counts, share, last, rows):
    """A bound below which at least one and at most `share` rows of a sample lie, or all if so few.

    First the word is bisected; where too many rows share it, as at the start, then the row.
    """

    def below(bound_used, bound_row):
        return jnp.sum(
            (counts & _below(used, row, bound_used, bound_row)).astype(jnp.int32), dtype=jnp.int32
        )

    def enough(found):
        return found * 4 >= share * 3

    def bisect(count_below, low, high, found):
        """The largest bound in [low, high] with at most `share` rows below, or a smaller one with
        enough of them; `found` lie below `low`."""

        def halve(carry):
            low, high, found = carry
            gap = high - low
            middle = low + (gap >> 1) + (gap & 1)
            new = count_below(middle)
            fits = new <= share
            low = jnp.where(fits, middle, low)
            found = jnp.where(fits, new, found)
            high = jnp.where(fits, high, middle - 1)
            return low, high, found

        return lax.while_loop(
            lambda carry: (carry[0] < carry[1]) & ~enough(carry[2]), halve, (low, high, found)
        )

    zero = share - share
    total = jnp.sum(counts.astype(jnp.int32), dtype=jnp.int32)
    least = jnp.min(jnp.where(counts, used, INT32_MAX))
    most = jnp.max(jnp.where(counts, used, 0))
    is_few = total <= share
    bound_used, _, found = bisect(
        lambda middle: below(middle, 0), jnp.where(is_few, most, least), most, zero
    )
    bound_row, _, _ = bisect(
        lambda middle: below(bound_used, middle), zero, jnp.where(is_few, zero, rows), found
    )
    return jnp.where(is_few, last[0], bound_used), jnp.where(is_few, last[1], bound_row)


def _sort(call: ln.Call, zero, count, epoch, bound) -> Queue:
    """Writes the first `count` rows of scratch to the queue, ordered by (word, row).

    A row's sort key is its word, less the least one, above its row. What does not fit in int32 stays
    out of the queue, and the bound comes down to it.
    """
    config, state, scratch, size = call.config, call.state, call.scratch, s.QUEUE_SIZE
    place = ln.lane_ids(size)
    inside = place < count
    row = ln.load(scratch, place, inside, 0)
    used = ln.load(state.row_used, row, inside, INT32_MAX)
    least = jnp.min(used)
    row_bits = max(1, (config.rows - 1).bit_length())
    span = 1 << (31 - row_bits)
    fits = inside & (used - least < span)
    lower = bound[0] - least >= span
    bound = (jnp.where(lower, least + span, bound[0]), jnp.where(lower, zero, bound[1]))
    key = jnp.where(fits, ((used - least) << row_bits) | row, INT32_MAX)
    ln.store(scratch, size + place, key, place >= 0)
    # The keys are loaded by all warps.
    call.barrier()

    def compare(i, rank):
        other = plgpu.load(scratch.at[size + i * SORT_TILE + ln.lane_ids(SORT_TILE)])
        # Neither key is negative: the sign of the difference is the comparison.
        before = lax.shift_right_logical(other[:, None] - key[None, :], jnp.int32(31))
        return rank + jnp.sum(before, 0, jnp.int32)

    rounds = (count + (SORT_TILE - 1)) // SORT_TILE
    rank = lax.fori_loop(jnp.int32(0), rounds, compare, jnp.zeros(size, jnp.int32))
    ln.store(state.queue, s.QUEUE_ROWS + rank, row, fits)
    # The sorted rows are loaded by all warps.
    call.barrier()
    return Queue(zero, jnp.sum(fits.astype(jnp.int32), dtype=jnp.int32), epoch, *bound)
