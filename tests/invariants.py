"""The planner's invariants, checked from one step's plan and the snapshots around it."""

from __future__ import annotations

import numpy as np

EMPTY = -7


class Bank:
    """A bank whose rows hold the key of the expert whose weights would lie there."""

    def __init__(self, config, snapshot, seed=0):
        self.rows = np.where(snapshot["row_key"] >= 0, snapshot["row_key"], EMPTY)
        self.experts = config.num_experts
        self.rng = np.random.default_rng(seed)

    def copy_in(self, layer, plan):
        """Carries out a copy list, in any order."""
        for i in self.rng.permutation(int(plan["copy_count"])):
            self.rows[plan["copy_dst"][i]] = layer * self.experts + plan["copy_src"][i]


def check_step(config, before, layer, plan, after, bank):
    """Asserts what holds after every step, whatever the controls; fills the bank."""
    rows, base = config.rows, layer * config.num_experts
    # Resident keys and pool rows are a bijection; staging rows are never owned.
    owned = after["row_key"][:rows]
    assert np.array_equal(after["key_row"][owned], np.arange(rows))
    assert np.count_nonzero(after["key_row"] >= 0) == rows
    assert (after["row_key"][rows:] == -1).all()
    # Every valid lane has a route, and the same as its expert's; rows of different experts differ.
    valid = plan["safe_ids"] >= 0
    assert np.array_equal(plan["routes"] >= 0, valid)
    row_of = dict(
        zip(plan["safe_ids"][valid].tolist(), plan["routes"][valid].tolist(), strict=True)
    )
    assert [row_of[e] for e in plan["safe_ids"][valid].tolist()] == plan["routes"][valid].tolist()
    assert len(set(row_of.values())) == len(row_of)
    # The counts add up, and the lists end where they say.
    count, promoted, staged = plan["copy_count"], plan["promoted_count"], plan["staged_count"]
    assert count == promoted + staged
    for name, length in (
        ("copy_src", count),
        ("copy_dst", count),
        ("staged_expert", staged),
        ("staged_row", staged),
    ):
        assert (plan[name][:length] >= 0).all() and (plan[name][length:] == -1).all(), name
    # No row that the step selected, or found resident and kept, is a victim.
    hits = {row for e, row in row_of.items() if before["key_row"][base + e] == row}
    assert not hits & set(plan["copy_dst"][:count].tolist())
    # The bank holds the right weights once the copy list has been carried out in any order.
    bank.copy_in(layer, plan)
    for expert, row in row_of.items():
        assert bank.rows[row] == base + expert
    assert np.array_equal(bank.rows[:rows], owned)
