"""The victim queue of the fused kernel: the oldest rows of the pool, oldest first.

Why a queue is exact: a row's clock only ever grows, to at least the clock of the step that filled the
queue. The queue holds *all* rows older than a bound that is no later than that clock. So a row older
than the bound was not used since, all such rows stand in the queue, in their order, and any row
outside it is younger. A row is live while it is older than the bound; an entry that was used since,
by whichever kernel, is passed over. Ties go by the row: a bound is (epoch, used, row).

A refill reads the pool once, whatever its size, and has three parts:
1. of a sample of rows spread over the pool it finds, by bisection, a bound that a few hundred rows of
   the pool lie below;
2. it marks the rows below that bound, one bit a row, and then collects the marked rows, which are few;
3. it sorts them by counting, for each, how many come before. Where a bound let through more rows than
   the queue holds, the oldest of them fill it, and the bound comes down to the first that is left out.

Where ages mislead the sample so far that more lie below than can be sorted, those collected are the next
sample, and the pool is marked again.
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
# from any pool, and a sample fits in registers up to 400,000 rows.
SAMPLE_STRIDE = 48
LEAST_SAMPLE = 2048
MOST_SAMPLE = 8192
# Rows that should lie below a bound, as a share of the queue. The more, the fewer refills, and the more
# often the sample's error lets through more than the queue holds, which takes a longer sort.
AIM = 0.7
HASH = -1640531527  # 2**32 over the golden ratio: Knuth's multiplicative hash.
# Columns of a tile of the pool, and tiles that are loaded before the first is looked at.
COLUMNS = 1024
TILES_AHEAD = 4
TILES_AHEAD_TIES = 1  # Where rows are judged by more than their word, which takes more registers.
# Tiles that share a word of marks, and words that are looked at together.
WORD_BITS = 32
WORDS = 2048
# Queue entries that are looked at together, where the step has fewer lanes; and how many more than its
# lanes may need a step looks at first: an entry more is a load more.
MIN_WINDOW = 32
SPARE = 15
# Rows that can be collected and sorted, so many at a time; and of others that a round compares them with.
COLLECTED = 2 * s.QUEUE_SIZE
SORT_LANES = 512
SORT_TILE = 16


class Queue(NamedTuple):
    """The queue's scalars: live entries lie in [head, tail); the bound of those that count as live; and a
    mere hint, how many entries the last eviction passed over, used since."""

    head: jax.Array
    tail: jax.Array
    epoch: jax.Array
    used: jax.Array
    row: jax.Array
    passed: jax.Array


def read_queue(state: PoolState) -> Queue:
    return Queue(*(state.queue[i] for i in range(s.QUEUE_HEAD, s.QUEUE_PASSED + 1)))


class Window(NamedTuple):
    """The entries at the head of the queue that are looked at together: `span` of them. Vectors."""

    span: jax.Array
    row: jax.Array
    epoch: jax.Array
    used: jax.Array
    key: jax.Array


def _widest(config: PoolConfig) -> int:
    """Entries of the widest window."""
    return max(config.width, MIN_WINDOW)


def _inside(config: PoolConfig, queue: Queue, span) -> tuple[jax.Array, jax.Array]:
    """Each place of the widest window, and whether it is one of the first `span`, and the queue's."""
    place = ln.lane_ids(_widest(config))
    return place, (place < span) & (queue.head + place < queue.tail)


def load_rows(call: ln.Call, queue: Queue) -> jax.Array:
    """Loads the rows of the widest window."""
    widest = _widest(call.config)
    place, inside = _inside(call.config, queue, widest)
    return ln.load(call.state.queue, s.QUEUE_ROWS + queue.head + place, inside, 0)


def first_span(config: PoolConfig, queue: Queue, missed_lanes: jax.Array) -> jax.Array:
    """Entries that a step with so many missed lanes looks at first: as many again as it may need, if as
    many were used since as the last time."""
    widest = _widest(config)
    passed = queue.passed & (2 * widest - 1)  # Whatever the hint is, it does no harm.
    return jnp.minimum(2 * (missed_lanes + passed) + SPARE, widest)


def load_window(
    call: ln.Call, clock: ck.Clock, queue: Queue, row: jax.Array, span: jax.Array
) -> Window:
    """Loads what a step must know of the first `span` rows from `load_rows`. A barrier must stand between
    the stamps of the hits and this."""
    _, inside = _inside(call.config, queue, span)
    return Window(
        span=span,
        row=row,
        epoch=ages.load_epoch(call, clock, row, inside),
        used=ln.load(call.state.row_used, row, inside, 0),
        key=ln.load(call.state.row_key, row, inside, -1),
    )


def scratch_words(config: PoolConfig) -> int:
    """The rows that a refill collects, then their sort keys, or before that the marks."""
    return COLLECTED + max(COLLECTED, _mark_groups(config) * _columns(config))


def _sampled(config: PoolConfig) -> int:
    """Rows of the sample, a power of two: no more than the pool has."""
    sampled = ln.next_power_of_two(-(-config.rows // SAMPLE_STRIDE))
    sampled = min(max(sampled, LEAST_SAMPLE), MOST_SAMPLE)
    return min(sampled, ln.next_power_of_two(config.rows + 1) // 2)


def _columns(config: PoolConfig) -> int:
    return min(COLUMNS, ln.next_power_of_two(config.rows))


def _mark_groups(config: PoolConfig) -> int:
    """Groups of tiles that share their words of marks."""
    return -(-config.rows // (_columns(config) * WORD_BITS))


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
        taken, _, is_first, queue = carry
        was_empty = queue.head == queue.tail
        queue = lax.cond(
            was_empty,
            lambda: _refill(call, clock),
            lambda: Queue(*(x + 0 for x in queue)),
        )
        span, row, epoch, used, key = lax.cond(
            (is_first != 0) & ~was_empty,
            lambda: Window(*(x + 0 for x in window)),
            lambda: load_window(call, clock, queue, load_rows(call, queue), zero + _widest(config)),
        )
        place, inside = _inside(config, queue, span)
        live = inside & (epoch == queue.epoch) & _below(used, row, queue.used, queue.row)
        may_go = live & ck.before((epoch, used), rules.horizon)
        count = may_go.astype(jnp.int32)
        rank = lax.cumsum(count) - count
        take = may_go & (rank < need - taken)
        # The head moves to the first live entry that stays, past what is taken or was used since.
        stays = jnp.minimum(jnp.min(jnp.where(live & ~take, place, _widest(config))), span)
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
        # A live entry that stays though more are needed is too young, and so are all behind it. Where
        # not even a refill gave one that may go, there is none, or the tables are corrupt.
        more = (taken < need) & ~empty & (stays == span) & (~was_empty | (some > 0))
        head = jnp.minimum(queue.head + stays, queue.tail)
        passed = jnp.where(is_first != 0, 0, queue.passed) + (head - queue.head - some)
        return taken, more, zero, queue._replace(head=head, passed=passed)

    zero = need - need
    taken, _, _, queue_after = lax.while_loop(
        lambda carry: carry[1], take_some, (zero, need > 0, zero + 1, queue)
    )
    for i, value in zip(range(s.QUEUE_HEAD, s.QUEUE_PASSED + 1), queue_after, strict=True):
        state.queue[i] = value
    return taken


def _refill(call: ln.Call, clock: ck.Clock) -> Queue:
    """Fills the queue with the oldest rows of the pool, of those older than this step.

    Returns:
      The new queue; empty if there is no such row.
    """
    config, state, scratch = call.config, call.state, call.scratch
    sampled = _sampled(config)
    columns = _columns(config)
    epoch = ages.oldest_epoch(call, clock, columns)
    zero = epoch - epoch
    rows = zero + config.rows  # A select between two literals would lower to one of booleans.
    is_current = epoch == clock[0]
    # The bound that all rows of this epoch, older than this step, lie below.
    last_used = jnp.where(is_current, clock[1], INT32_MAX)
    last_row = jnp.where(is_current, zero, rows)

    def stratum_begin(i):
        """i * rows / sampled, without leaving int32."""
        return i * (config.rows // sampled) + i * (config.rows % sampled) // sampled

    def choose_bound(count):
        """A bound from the sample: of the whole pool, or of the rows collected last, if too many."""
        lane = ln.lane_ids(sampled)
        again = count > COLLECTED

        def load_sample():
            collected = ln.load(scratch, lane, again & (lane < COLLECTED), 0)
            # One row of each stratum of the pool, at a hashed place: rows of one age may stand at a
            # regular distance, a layer's share of the pool.
            hashed = lax.shift_right_logical(lane * HASH, jnp.int32(16))
            stratum = min(config.rows // sampled, 2**15 - 1)  # The product must fit in int32.
            spread = stratum_begin(lane) + ((hashed * stratum) >> 16)
            row = jnp.where(again, collected, spread)
            inside = ~again | (lane < COLLECTED)
            row_epoch = ages.load_epoch(call, clock, row, inside)
            used = ln.load(state.row_used, row, inside, INT32_MAX)
            counts = inside & (row_epoch == epoch) & _below(used, row, last_used, last_row)
            return row, used, counts

        def load_places(bound_used):
            row, used, counts = load_sample()
            # Strata are in the order of their rows, those collected are in none.
            return jnp.where(counts & (used == bound_used), jnp.where(again, row, lane), INT32_MAX)

        # Of the collected rows it must be less than all, so that the bound comes down.
        of_collected = s.QUEUE_SIZE // 2 * min(COLLECTED, sampled) // jnp.maximum(count, 1)
        of_pool = int(AIM * s.QUEUE_SIZE * sampled / config.rows)
        share = jnp.maximum(1, jnp.where(again, of_collected, of_pool))
        _, used, counts = load_sample()
        bound_used, place, is_all = _quantile(
            used, counts, load_places, jnp.where(again, rows, sampled), share
        )
        bound_row = jnp.where(again, place, stratum_begin(place))
        return jnp.where(is_all, last_used, bound_used), jnp.where(is_all, last_row, bound_row)

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
            ln.store(scratch, COLLECTED + group * columns + column, word, column >= 0)
            return word, *following

        batches = -(-tiles // ahead)
        lax.fori_loop(
            jnp.int32(0), jnp.int32(batches), look, (column - column, *load_batch(zero))
        )

    def collect():
        """Writes the marked rows to scratch, as many as fit; returns how many there are."""
        words = _mark_groups(config) * columns
        tile = min(WORDS, ln.next_power_of_two(words))

        def write_tile(i, found):
            at = i * tile + ln.lane_ids(tile)
            word = ln.load(scratch, COLLECTED + at, at < words, 0)
            first_tile, column = at // columns * WORD_BITS, at % columns
            ones = lax.population_count(word)
            place = found + lax.cumsum(ones) - ones

            def write_lowest(_, carry):
                word, place = carry
                bit = lax.population_count((word & -word) - 1)
                row = (first_tile + bit) * columns + column
                ln.store(scratch, place, row, (word != 0) & (place < COLLECTED))
                return word & (word - 1), place + 1

            lax.fori_loop(jnp.int32(0), jnp.max(ones), write_lowest, (word, place))
            return found + jnp.sum(ones, dtype=jnp.int32)

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-words // tile)), write_tile, zero)

    def attempt(carry):
        bound = choose_bound(carry[0])
        mark(bound)
        # The marks are loaded below. choose_bound may have loaded collected rows, now stored anew.
        call.barrier()
        count = collect()
        # What was collected is loaded by the next attempt, or by the sort.
        call.barrier()
        # Each attempt finds fewer, unless the table is corrupt: with a negative word _below may overflow.
        more = (count > COLLECTED) & ((carry[0] < 0) | (count < carry[0]))
        return count, more, bound

    count, _, bound = lax.while_loop(
        lambda carry: carry[1], attempt, (zero - 1, zero == 0, (last_used, last_row))
    )
    return _sort(call, zero, jnp.minimum(count, COLLECTED), epoch, bound)


def _quantile(used, counts, load_places, end, share):
    """A bound (used, place) below which at least one and at most `share` members of a sample lie.

    First the word is bisected; where far too many members share it, as at the start, then the place.

    Args:
      used: each member's word.
      counts: whether the member counts.
      load_places: word -> each member's place if it counts and has that word, else INT32_MAX. Loaded when
        needed, which is rare, the places take no registers until then.
      end: no place is as large.
      share: at least 1.

    Returns:
      The bound's two words, and whether no more than `share` members count at all.
    """

    def number(which):
        return jnp.sum(which.astype(jnp.int32), dtype=jnp.int32)

    def enough(found):
        return found * 4 >= share * 3

    def bisect(count_below, low, high, found):
        """The largest bound in [low, high] with at most `share` members below, or a smaller one with
        enough of them, and how many that is; `found` lie below `low`."""

        def halve(carry):
            low, high, found = carry
            middle = (low | high) - ((low ^ high) >> 1)  # Rounded up. The sum might overflow.
            new = count_below(middle)
            fits = new <= share
            low = jnp.where(fits, middle, low)
            found = jnp.where(fits, new, found)
            high = jnp.where(fits, high, middle - 1)
            return low, high, found

        low, _, found = lax.while_loop(
            lambda carry: (carry[0] < carry[1]) & ~enough(carry[2]), halve, (low, high, found)
        )
        return low, found

    zero = share - share
    is_all = number(counts) <= share
    most = jnp.max(jnp.where(counts, used, -INT32_MAX - 1))
    used = jnp.where(counts, used, INT32_MAX)  # Below no bound.
    least = jnp.where(is_all, most, jnp.min(used))
    bound_used, found = bisect(lambda middle: number(used < middle), least, most, zero)

    def bisect_places():
        place = load_places(bound_used)
        return bisect(lambda middle: found + number(place < middle), zero, end, found)[0]

    # Ties make marking slow: some fewer rows are better.
    bound_place = lax.cond(is_all | (found * 4 >= share), lambda: zero + 0, bisect_places)
    return bound_used, bound_place, is_all


def _sort(call: ln.Call, zero, count, epoch, bound) -> Queue:
    """Writes the first `count` rows of scratch to the queue, ordered by (word, row).

    A row's sort key is its word, less the least one, above its row. What does not fit in int32 or in the
    queue stays out of it, and the bound comes down to it.
    """
    config, state, scratch = call.config, call.state, call.scratch
    place = ln.lane_ids(COLLECTED)
    inside = place < count
    row = ln.load(scratch, place, inside, 0)
    used = ln.load(state.row_used, row, inside, INT32_MAX)
    least = jnp.min(used)
    row_bits = max(1, (config.rows - 1).bit_length())
    span = 1 << (31 - row_bits)

    def within(word):  # Negative is the difference only where it overflows, in a corrupt table.
        return (word - least >= 0) & (word - least < span)

    fits = inside & within(used)
    lower = (bound[0] >= least) & ~within(bound[0])
    bound = (jnp.where(lower, least + span, bound[0]), jnp.where(lower, zero, bound[1]))
    key = jnp.where(fits, ((used - least) << row_bits) | row, INT32_MAX)
    ln.store(scratch, COLLECTED + place, key, place >= 0)
    fitting = jnp.sum(fits.astype(jnp.int32), dtype=jnp.int32)
    # The keys are loaded by all warps.
    call.barrier()

    def sort_some(i, left_out):
        """Puts some of the rows where they belong; returns the key of the first that is left out."""
        key = plgpu.load(scratch.at[COLLECTED + i * SORT_LANES + ln.lane_ids(SORT_LANES)])

        def compare(j, rank):
            other = plgpu.load(scratch.at[COLLECTED + j * SORT_TILE + ln.lane_ids(SORT_TILE)])
            # Neither key is negative: the sign of the difference is the comparison.
            before = lax.shift_right_logical(other[:, None] - key[None, :], jnp.int32(31))
            return rank + jnp.sum(before, 0, jnp.int32)

        rounds = (count + (SORT_TILE - 1)) // SORT_TILE
        rank = lax.fori_loop(jnp.int32(0), rounds, compare, jnp.zeros(SORT_LANES, jnp.int32))
        row = key & ((1 << row_bits) - 1)
        ln.store(state.queue, s.QUEUE_ROWS + rank, row, rank < jnp.minimum(fitting, s.QUEUE_SIZE))
        # Not summed: the largest key of all is that of what does not fit, too.
        return jnp.maximum(left_out, jnp.max(jnp.where(rank == s.QUEUE_SIZE, key, 0)))

    pieces = (count + (SORT_LANES - 1)) // SORT_LANES
    left_out = lax.fori_loop(jnp.int32(0), pieces, sort_some, zero)
    full = fitting > s.QUEUE_SIZE
    bound = (
        jnp.where(full, least + (left_out >> row_bits), bound[0]),
        jnp.where(full, left_out & ((1 << row_bits) - 1), bound[1]),
    )
    # The sorted rows are loaded by all warps.
    call.barrier()
    tail = jnp.minimum(fitting, s.QUEUE_SIZE)
    return Queue(zero, tail, epoch, used=bound[0], row=bound[1], passed=zero)
