"""Every way in which a table of the state can be wrong: `check_state` finds it and names the table.

What is right is written down here once more, as the semantics state it (`wrong_tables`), and each
entry of each table is replaced by each value that could matter: `check_state` must refuse those,
and only those, that break the semantics. The queue, which the semantics do not know, has its own
list.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_pool as pp
from pallas_pool import state as fields
from tests.support import CONFIG, EDGE, MOST, aged, assert_same, one_step, plan_dict

LEAST = -EDGE
ROWS, KEYS = CONFIG.rows, CONFIG.keys
TABLES = tuple(name for name in fields.STATE_FIELDS if name != "queue")


def changed(state, **arrays):
    """The state with whole arrays replaced, and everything else, the queue too, as it is."""
    leaves = [np.asarray(arrays.get(name, getattr(state, name))) for name in fields.STATE_FIELDS]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def put(state, name, index, value):
    """The state with one entry, or a slice, of one table replaced."""
    table = np.array(getattr(state, name))
    table[index] = value
    return changed(state, **{name: table})


def without_queue(state):
    """Its queue empty, so that a change of a table contradicts no queue."""
    return put(state, "queue", slice(None), 0)


def walked(clock=0, steps=6, **controls):
    """A state in use: hits, promotions, staged experts and miss counts, the queue half used."""
    used = clock - np.arange(ROWS) % 3 if clock else None
    state, _ = aged(CONFIG, clock, clock // 3, used)
    state = pp.set_controls(state, promote_min_misses=2, **controls)
    stream = [(0, [0, 7]), (2, [5, 0, 6]), (0, [7, 3]), (2, [5, 2]), (0, [3, 1]), (1, [4, 0])]
    for layer, ids in stream[:steps]:
        lanes = np.array(ids + [-1] * (CONFIG.width - len(ids)), np.int32)
        _, state = one_step("fused", CONFIG)(state, np.int32(layer), lanes)
    pp.check_state(CONFIG, state)
    return jax.device_get(state)


@pytest.fixture(scope="module")
def young():
    return walked()


@pytest.fixture(scope="module")
def old():
    """Its clock, and half of its rows, past 2**31."""
    return walked(EDGE - 3)


def wrong_tables(state):
    """The tables of which an invariant is broken, by the names that messages begin with; read off
    the semantics, entry by entry."""
    key_row, row_key = state.key_row.tolist(), state.row_key.tolist()
    scalars = [int(x) for x in state.scalars]
    clock = scalars[fields.CLOCK_EPOCH] * EDGE + scalars[fields.CLOCK]
    forwards = scalars[fields.FORWARDS_EPOCH] * EDGE + scalars[fields.FORWARDS]
    owned = {key: row for row, key in enumerate(row_key[:ROWS])}
    resident = {key: row for key, row in enumerate(key_row) if row != -1}
    ages = list(zip(state.row_epoch.tolist(), state.row_used.tolist(), strict=True))
    misses = list(enumerate(state.miss_count.tolist()))
    wrong = set()
    if owned != resident or len(owned) != ROWS or set(row_key[ROWS:]) != {-1}:
        wrong |= {"key_row", "row_key"}
    if min(scalars[: fields.FORWARDS_EPOCH + 1]) < 0:
        wrong |= {"scalars"}
    if any(epoch < 0 or word < 0 or epoch * EDGE + word > clock for epoch, word in ages):
        wrong |= {"row_used", "row_epoch"}
    if forwards > clock:
        wrong |= {"forwards"}
    if any(count < 0 or (key in resident and count) for key, count in misses):
        wrong |= {"miss_count"}
    return wrong


def assert_judged(state, where):
    """`check_state` refuses the state if and only if an invariant is broken, and names a table."""
    wrong = wrong_tables(state)
    try:
        pp.check_state(CONFIG, state)
        said = None
    except pp.PoolError as error:
        said = str(error)
    assert (said is None) == (not wrong), f"{where}: {said}, expected {wrong}"
    if wrong:
        assert said.startswith(tuple(wrong)), f"{where}: {said} does not name {wrong}"
    return bool(wrong)


SMALL = range(-2, max(KEYS, CONFIG.bank_rows) + 2)
VALUES = (*SMALL, LEAST, LEAST + 1, MOST - 1, MOST)


@pytest.mark.parametrize("name", TABLES[:-1])
@pytest.mark.parametrize("age", ["young", "old"])
def test_every_entry_of_every_table(request, age, name):
    state = without_queue(request.getfixturevalue(age))
    refused = 0
    for index in range(len(getattr(state, name))):
        for value in VALUES:
            bad = put(state, name, index, value)
            refused += assert_judged(bad, f"{name}[{index}] = {value}")
    # Few values of a table are right.
    assert refused > len(VALUES) * len(getattr(state, name)) // 4


@pytest.mark.parametrize("name", ["key_row", "row_key"])
def test_two_entries_exchanged(young, name):
    """Each value is legal and stands there once: only the other table tells."""
    state = without_queue(young)
    table = getattr(state, name)
    for i, j in itertools.combinations(range(len(table)), 2):
        bad = put(state, name, [i, j], table[[j, i]])
        assert assert_judged(bad, f"{name}[{i}, {j}]") == (table[i] != table[j])


def test_both_tables_changed_alike_are_another_placement(young):
    """Two keys that change rows in both tables leave a legal state."""
    i, j = young.row_key[:2]
    state = put(young, "row_key", [0, 1], [j, i])
    state = without_queue(put(state, "key_row", [i, j], [1, 0]))
    assert not assert_judged(state, "two residents exchanged")


@pytest.mark.parametrize("index", range(fields.GATE))
def test_words_of_the_clock_and_of_the_forwards(young, old, index):
    for state in (without_queue(young), without_queue(old)):
        refused = [assert_judged(put(state, "scalars", index, x), f"{index}: {x}") for x in VALUES]
        assert any(refused) and not all(refused)


@pytest.mark.parametrize("name", fields.CONTROLS)
def test_each_control_at_and_past_its_ends(young, name):
    index, low, high = fields.CONTROLS[name]
    for value in (low, high):
        pp.check_state(CONFIG, put(young, "scalars", index, value))
    for value in {LEAST, -2, low - 1, *({high + 1, MOST} if high < MOST else ())}:
        with pytest.raises(pp.PoolError, match=f"^{name} must be in .*, got {value}$"):
            pp.check_state(CONFIG, put(young, "scalars", index, value))


@pytest.mark.parametrize("value", [0, 2, 4, -3, MOST, LEAST])
def test_the_number_of_layers(young, value):
    with pytest.raises(pp.PoolError, match=f"made for {value} layers, the config has 3"):
        pp.check_state(CONFIG, put(young, "scalars", fields.LAYERS, value))


@pytest.mark.parametrize("value", [1, 2, -1, MOST, LEAST])
def test_a_recorded_error(young, value):
    with pytest.raises(pp.PoolError, match="a step saw an invalid lane"):
        pp.check_state(CONFIG, put(young, "scalars", fields.ERROR, value))


@pytest.mark.parametrize("name", TABLES)
def test_whole_tables_of_another_moment(young, name):
    """A checkpoint half of which is older: one table of three steps ago among the newer ones."""
    earlier = walked(steps=3)
    mixed = without_queue(changed(young, **{name: getattr(earlier, name)}))
    is_wrong = assert_judged(mixed, f"{name} of another moment")
    # Rows used less, and other counts of misses, are a state that might have been.
    assert is_wrong or name in ("row_used", "row_epoch", "miss_count")


@pytest.mark.parametrize("seed", range(4))
def test_garbage(young, seed):
    """Random bits in a random part of a random choice of tables."""
    rng = np.random.default_rng(seed)
    for trial in range(50):
        state = without_queue(young)
        for name in rng.permutation(TABLES)[: rng.integers(1, len(TABLES) + 1)]:
            table = getattr(state, name)
            if name == "scalars":  # The clock's words: the controls have a test of their own.
                bits = rng.integers(0, 20, fields.GATE) * rng.choice([1, 1, -1])
                state = put(state, name, slice(fields.GATE), bits)
                continue
            bits = rng.integers(LEAST, MOST + 1, table.shape) >> int(rng.integers(0, 32))
            where = rng.random(table.shape) < rng.choice([0.05, 1.0])
            state = changed(state, **{name: np.where(where, bits, table).astype(np.int32)})
        assert_judged(state, f"trial {trial}")


# The queue: where its head, tail and bound stand, and from where on its rows.
HEAD, TAIL, ROW = fields.QUEUE_HEAD, fields.QUEUE_TAIL, fields.QUEUE_ROWS
BOUND = {"epoch": fields.QUEUE_EPOCH, "used": fields.QUEUE_USED, "row": fields.QUEUE_ROW}


def queue_of(state):
    """Its head, tail, and the places of its live entries: older than the bound."""
    queue = state.queue.tolist()
    used = pp.snapshot(CONFIG, state)["row_used"]
    bound = (queue[BOUND["epoch"]] * EDGE + queue[BOUND["used"]], queue[BOUND["row"]])
    places = range(ROW + queue[HEAD], ROW + queue[TAIL])
    return queue[HEAD], queue[TAIL], [p for p in places if (used[queue[p]], queue[p]) < bound]


def refuse_queue(state, index, value, message="queue: "):
    with pytest.raises(pp.PoolError, match=f"^{message}"):
        pp.check_state(CONFIG, put(state, "queue", index, value))


@pytest.fixture(scope="module")
def queued(young):
    head, tail, live = queue_of(young)
    assert 0 < head < tail and len(live) >= 2
    return young


@pytest.mark.parametrize("value", [LEAST, -1, fields.QUEUE_SIZE + 1, MOST])
@pytest.mark.parametrize("end", [HEAD, TAIL])
def test_a_head_or_tail_outside(queued, end, value):
    refuse_queue(queued, end, value, r"queue: head -?\d+, tail -?\d+ are not 0 <= head <= tail")


def test_a_head_behind_the_tail(queued):
    head, tail, _ = queue_of(queued)
    refuse_queue(queued, HEAD, tail + 1, "queue: head .* are not 0 <= head <= tail")
    refuse_queue(queued, TAIL, head - 1, "queue: head .* are not 0 <= head <= tail")


def test_entries_that_are_no_pool_rows(queued):
    """A staging row is none either."""
    for place in range(*(ROW + end for end in queue_of(queued)[:2])):
        for value in (LEAST, -1, ROWS, CONFIG.bank_rows - 1, MOST):
            refuse_queue(queued, place, value, "queue: an entry is no pool row")


def test_entries_out_of_order(queued):
    live = queue_of(queued)[2]
    for i, j in itertools.combinations(live, 2):
        refuse_queue(queued, [i, j], queued.queue[[j, i]], "queue: .*oldest first")


def test_a_row_that_is_missing(queued):
    """Lost at either end, or overwritten by any other row."""
    _, tail, live = queue_of(queued)
    refuse_queue(queued, HEAD, live[0] - ROW + 1)
    refuse_queue(queued, TAIL, live[-1] - ROW)
    refuse_queue(queued, [HEAD, TAIL], [tail, tail])
    for place, row in itertools.product(live, range(ROWS)):
        if row != queued.queue[place]:
            refuse_queue(queued, place, row)


def test_a_row_that_stands_there_twice(queued):
    _, tail, live = queue_of(queued)
    bad = put(queued, "queue", ROW + tail, queued.queue[live[0]])
    refuse_queue(bad, TAIL, tail + 1)


def test_a_bound_that_takes_in_rows_outside_the_queue(queued):
    used = pp.snapshot(CONFIG, queued)["row_used"]
    outside = set(range(ROWS)) - {queued.queue[place] for place in queue_of(queued)[2]}
    for row in outside:
        refuse_queue(queued, list(BOUND.values()), [0, used[row], row + 1])


def test_a_bound_later_than_the_clock(queued):
    """Every pool row stands there in order, but rows that the next step uses would still count as
    older, where they no longer are."""
    used = pp.snapshot(CONFIG, queued)["row_used"]
    order = np.lexsort((np.arange(ROWS), used))
    state = put(queued, "queue", slice(ROW, ROW + ROWS), order)
    clock = int(queued.scalars[fields.CLOCK])
    for epoch, word in ((0, clock + 1), (0, MOST), (1, 0), (MOST, MOST)):
        head = [0, ROWS, epoch, word, 0]
        refuse_queue(state, slice(5), head, "queue: .*bound")


def test_a_bound_of_a_later_epoch_than_a_row(old):
    """A queue is filled from the rows of the oldest epoch alone, and read so."""
    used = pp.snapshot(CONFIG, old)["row_used"]
    state = put(old, "queue", slice(ROW, ROW + ROWS), np.lexsort((np.arange(ROWS), used)))
    assert used.min() < EDGE < used.max()
    for word in range(1, int(used.max()) - EDGE + 1):
        head = [0, np.sum(used < EDGE + word), 1, word, 0]
        refuse_queue(state, slice(5), head, "queue: .*bound")


@pytest.mark.parametrize("value", [-1, LEAST])
@pytest.mark.parametrize("word", BOUND)
def test_a_negative_word_of_the_bound(queued, word, value):
    """As if no row were older: no live entry could be missing."""
    refuse_queue(queued, BOUND[word], value, "queue: .*bound")


def test_a_table_changed_under_the_queue(queued):
    """A row outside that grows old, and two rows inside that change their order."""
    inside = [int(queued.queue[place]) for place in queue_of(queued)[2]]
    assert queued.queue[BOUND["used"]] > 1
    olds = [put(queued, "row_used", row, 0) for row in range(ROWS) if row not in inside]
    exchanged = put(queued, "row_used", inside[:2], [1, 0])
    for bad in (*olds, exchanged):
        with pytest.raises(pp.PoolError, match=r"^queue: .*oldest first"):
            pp.check_state(CONFIG, bad)


def test_a_queue_of_another_moment(queued):
    """Today's queue, among older tables, lacks the rows that were promoted since."""
    earlier = walked(steps=2)
    with pytest.raises(pp.PoolError, match=r"^queue: "):
        pp.check_state(CONFIG, changed(earlier, queue=queued.queue))


def test_what_lies_outside_the_queue_does_not_matter(queued):
    head, tail, _ = queue_of(queued)
    for value in (LEAST, -1, ROWS, MOST):
        state = put(queued, "queue", slice(ROW + tail, None), value)
        pp.check_state(CONFIG, put(state, "queue", slice(ROW, ROW + head), value))
    pp.check_state(CONFIG, without_queue(queued))


def corrupted_a_little(rng, state):
    """Some words of the queue and of the ages changed to values that are likely to be legal."""
    used = pp.snapshot(CONFIG, state)["row_used"]
    clock = int(state.scalars[fields.CLOCK])
    if rng.random() < 0.5:  # A queue that holds what a random bound asks for.
        row, n = rng.integers(ROWS), rng.integers(-1, 2)
        epoch, word = divmod(max(0, int(used[row]) + n), EDGE)
        order = np.lexsort((np.arange(ROWS), used))
        head = [0, np.sum(used < epoch * EDGE + word), epoch, word, 0]
        state = put(state, "queue", slice(5), head)
        state = put(state, "queue", slice(ROW, ROW + ROWS), order)
    for _ in range(rng.integers(0, 4)):
        word = rng.integers(ROW + ROWS)
        value = rng.choice([rng.integers(-1, ROWS + 1), clock, MOST, LEAST])
        state = put(state, "queue", word, value)
    if rng.random() < 0.2:
        state = put(state, "row_used", rng.integers(ROWS), rng.integers(0, clock + 1))
    return state


@pytest.mark.parametrize("age", ["young", "old"])
def test_what_is_accepted_is_planned_right(request, age):
    """Once `check_state` lets a queue pass, the fused kernel decides as the reference does, which
    does not know of it."""
    start = request.getfixturevalue(age)
    rng = np.random.default_rng(len(age))
    accepted = 0
    for trial in range(200):
        state = corrupted_a_little(rng, start)
        try:
            pp.check_state(CONFIG, state)
        except pp.PoolError:
            continue
        accepted += 1
        states = dict.fromkeys(("fused", "reference"), jax.tree.map(jnp.asarray, state))
        for step in range(3):
            layer = np.int32(rng.integers(CONFIG.num_layers))
            ids = rng.integers(-1, CONFIG.num_experts, CONFIG.width, np.int32)
            results = {}
            for name, state in states.items():
                plan, states[name] = one_step(name, CONFIG)(state, layer, ids)
                results[name] = plan_dict(plan) | pp.snapshot(CONFIG, states[name])
            assert_same(results["fused"], results["reference"], f"trial {trial}, step {step}")
        pp.check_state(CONFIG, states["fused"])
    assert 20 < accepted < 180


OTHER = {
    "int64": lambda x: x.astype(np.int64),
    "uint32": lambda x: x.astype(np.uint32),
    "int8": lambda x: x.astype(np.int8),
    "bool": lambda x: x.astype(bool),
    "float64": lambda x: x.astype(np.float64),
    "a list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "objects": lambda x: x.astype(object),
    "a scalar": lambda x: x[0],
    "empty": lambda x: x[:0],
    "one more": lambda x: np.append(x, x[:1]),
    "one less": lambda x: x[1:],
    "a column": lambda x: x[:, None],
}


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("name", fields.STATE_FIELDS)
def test_another_dtype_or_shape(young, name, what):
    """As NumPy arrays, which a checkpoint may give; JAX narrows 64-bit ones where it takes them."""
    leaves = {field: getattr(young, field) for field in fields.STATE_FIELDS}
    leaves[name] = OTHER[what](leaves[name])
    bad = pp.PoolState.tree_unflatten(None, list(leaves.values()))
    for read in (pp.check_state, pp.snapshot):
        with pytest.raises(pp.PoolError, match=rf"^state\.{name} must be int32\[\d+\]"):
            read(CONFIG, bad)
