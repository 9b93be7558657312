"""A sequential oracle of the planner in plain Python: unbounded ints, lists and dicts, no JAX.

It shares nothing with the library or the reference; `Oracle.snapshot` and the plans it returns have
the names of the semantics, so that they compare field by field with theirs.
"""

from __future__ import annotations

import copy
import math

import numpy as np

SATURATED = 2**31 - 1


class Oracle:
    def __init__(self, layers, experts, layer_rows, staging_rows, width, residents=None):
        self.layers, self.experts, self.width = layers, experts, width
        self.rows, self.staging_rows = sum(layer_rows), staging_rows
        self.row_of = {}  # key -> bank row
        self.key_of = [-1] * self.rows  # pool row -> key
        row = 0
        for layer in range(layers):
            for expert in range(layer_rows[layer]) if residents is None else residents[layer]:
                self.row_of[layer * experts + expert] = row
                self.key_of[row] = layer * experts + expert
                row += 1
        self.used = [0] * self.rows
        self.misses = {}
        self.clock = self.forwards = self.error = 0
        self.controls = {
            "gate": 1,
            "promote_limit": 0,
            "promote_interval": 1,
            "promote_min_misses": 1,
            "protect_recent": 0,
        }

    @classmethod
    def of(cls, config, residents=None):
        return cls(
            config.num_layers,
            config.num_experts,
            config.layer_rows,
            config.staging_rows,
            config.width,
            residents,
        )

    def copy(self):
        return copy.deepcopy(self)

    def set_controls(self, **values):
        self.controls |= {name: int(value) for name, value in values.items()}

    def snapshot(self):
        keys = self.layers * self.experts
        key_row = np.full(keys, -1)
        miss_count = np.zeros(keys, int)
        for key, row in self.row_of.items():
            key_row[key] = row
        for key, misses in self.misses.items():
            miss_count[key] = misses
        return {
            "key_row": key_row,
            "row_key": np.array(self.key_of + [-1] * self.staging_rows),
            "row_used": np.array(self.used),
            "miss_count": miss_count,
            "clock": self.clock,
            "forwards": self.forwards,
            **self.controls,
            "error": self.error,
        }

    def _lane_ids(self, layer, ids, weights):
        """The ids as Python ints, -1 for padding and invalid lanes."""
        safe = []
        for lane, expert in enumerate(np.asarray(ids).ravel().tolist()):
            ok = 0 <= expert < self.experts and 0 <= layer < self.layers
            if ok and weights is not None:
                weight = float(np.asarray(weights).ravel()[lane])
                ok = math.isfinite(weight) and weight >= 0
            if not ok and expert != -1:
                self.error = 1
            safe.append(expert if ok else -1)
        return safe

    def step(self, layer, ids, weights=None):
        ids = self._lane_ids(layer, ids, weights)
        c, base = self.controls, layer * self.experts
        selection = list(dict.fromkeys(expert for expert in ids if expert != -1))
        resident = {e: self.row_of[base + e] for e in selection if base + e in self.row_of}
        if c["gate"]:
            self.clock += 1
            self.forwards += layer == 0
            for row in resident.values():
                self.used[row] = self.clock
        step_rows, promoted, staged = dict(resident), [], []
        for expert in selection:
            if expert in resident:
                continue
            key = base + expert
            if c["gate"]:
                self.misses[key] = min(self.misses.get(key, 0) + 1, SATURATED)
            victim = None
            if (
                c["gate"]
                and self.forwards % c["promote_interval"] == 1 % c["promote_interval"]
                and (c["promote_limit"] == 0 or len(promoted) < c["promote_limit"])
                and self.misses[key] >= c["promote_min_misses"]
            ):
                victim = self._victim()
            if victim is None:
                step_rows[expert] = self.rows + len(staged)
                staged.append(expert)
            else:
                del self.row_of[self.key_of[victim]]
                self.row_of[key], self.key_of[victim] = victim, key
                self.used[victim] = self.clock
                self.misses[key] = 0
                step_rows[expert] = victim
                promoted.append(expert)
        return self._plan(layer, ids, step_rows, promoted, staged)

    def _victim(self):
        limit = self.clock
        if self.controls["protect_recent"]:
            limit -= self.controls["protect_recent"] * self.layers
        used = min(self.used)
        row = self.used.index(used)  # The first of its age.
        return row if used < self.clock and used < limit else None

    def _plan(self, layer, ids, step_rows, promoted, staged):
        def lanes(values):
            return np.array(list(values) + [-1] * (self.width - len(values)))

        step_map = [self.row_of.get(layer * self.experts + e, -1) for e in range(self.experts)]
        if not 0 <= layer < self.layers:
            step_map = [-1] * self.experts
        for expert in staged:
            step_map[expert] = step_rows[expert]
        copies = promoted + staged
        return {
            "routes": lanes([step_rows[e] if e != -1 else -1 for e in ids]),
            "safe_ids": lanes(ids),
            "copy_src": lanes(copies),
            "copy_dst": lanes([step_rows[e] for e in copies]),
            "copy_count": len(copies),
            "promoted_count": len(promoted),
            "staged_count": len(staged),
            "staged_expert": lanes(staged),
            "staged_row": lanes([step_rows[e] for e in staged]),
            "step_map": np.array(step_map),
        }
