"""Routing traces: what one is, and how it is read from a file.

Every error of a file is a `TraceError` whose text names the file, the line (in an array: token,
layer and lane) and the field.
"""

from __future__ import annotations

import csv
import re
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pallas_pool.config import INT32_MAX, MAX_LAYERS, MAX_WIDTH

# Unless the number of experts is given, an id from here on is taken for a mistake.
LARGEST_INFERRED = 2**16
# The array of an .npz that is read where it holds several and none is named: vLLM's and SGLang's.
NAME_IN_NPZ = "routed_experts"
INTEGER = re.compile(r"-?[0-9]{1,18}")


class TraceError(ValueError):
    """A file that is no routing trace."""


class Trace(NamedTuple):
    """Which experts the router chose.

    Attributes:
      ids: [T, L, K] int32 expert ids of each token and layer, -1 for none.
      layers: L numbers that the file gives them.
    """

    ids: np.ndarray
    layers: tuple[int, ...]


class Columns(NamedTuple):
    """Names of the columns of a CSV file.

    Attributes:
      token: an integer; tokens are replayed in its order.
      layer: an integer; the distinct ones, in order, are the layers.
      expert: an id, or -1 for none.
      lane: an integer that orders the experts of a token and layer; without it they stand in the
        order of the file.
    """

    token: str = "token"
    layer: str = "layer"
    expert: str = "expert"
    lane: str | None = None


COLUMNS = Columns()


def selected_lanes(ids: np.ndarray) -> np.ndarray:
    """[T, L, K] whether a lane selects an expert that no lane before it of that step selects."""
    selected = ids >= 0
    for lane in range(1, ids.shape[2]):
        selected[..., lane] &= (ids[..., :lane] != ids[..., lane, None]).all(2)
    return selected


def inferred_experts(*traces: Trace) -> int:
    """The least power of two above every id."""
    return 1 << max(int(trace.ids.max()) for trace in traces).bit_length()


def read(
    path: str | Path,
    experts: int | None = None,
    columns: Columns = COLUMNS,
    name: str | None = None,
) -> Trace:
    """Reads a trace, in a format that the suffix tells: .npy and .npz hold an array [tokens,
    layers, top_k], a .csv a line for each token, layer and expert, in any order, under a header.

    Args:
      path: of the file.
      experts: experts of a layer; ids must be below.
      columns: of a .csv.
      name: of the array in an .npz; not needed where there is one array, or `routed_experts`.

    Raises:
      TraceError: the file is missing or malformed.
    """
    path = Path(path)
    limit = experts or LARGEST_INFERRED
    try:
        if path.suffix.lower() in (".npy", ".npz"):
            return _checked(path, _array(path, name), limit)
        if path.suffix.lower() == ".csv":
            return _read_csv(path, columns, limit)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    raise TraceError(f"{path}: a trace is a .npy, .npz or .csv file, not {path.suffix!r}")


def _range(limit: int) -> str:
    hint = "; --experts allows larger ones" if limit == LARGEST_INFERRED else ""
    return f"an expert id must be in [-1, {limit}){hint}"


def _array(path: Path, name: str | None) -> np.ndarray:
    try:
        with path.open("rb") as file:  # So that a name is what the file says, not NumPy.
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            names = loaded.files
            if name is None and len(names) > 1 and NAME_IN_NPZ in names:
                name = NAME_IN_NPZ
            if name is None and len(names) != 1:
                raise TraceError(f"{path}: --array must name one of {', '.join(names) or 'none'}")
            if name is not None and name not in names:
                raise TraceError(f"{path}: no array {name!r} among {', '.join(names)}")
            return loaded[names[0] if name is None else name]
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: no array that NumPy can read: {error}") from None


def _checked(path: Path, ids: np.ndarray, limit: int) -> Trace:
    if ids.dtype.kind not in "iu":
        raise TraceError(f"{path}: dtype must be an integer, got {ids.dtype}")
    if ids.ndim != 3 or not ids.size:
        raise TraceError(
            f"{path}: shape must be [tokens, layers, top_k], none of them 0, got {list(ids.shape)}"
        )
    for axis, name, most in ((1, "layers", MAX_LAYERS), (2, "top_k", MAX_WIDTH)):
        if ids.shape[axis] > most:
            raise TraceError(f"{path}: {name} must be at most {most}, got {ids.shape[axis]}")
    bad = (ids < -1) | (ids >= limit)
    if bad.any():
        token, layer, lane = (int(x) for x in np.argwhere(bad)[0])
        raise TraceError(
            f"{path}: token {token}, layer {layer}, lane {lane}: {ids[token, layer, lane]}: "
            + _range(limit)
        )
    if (ids < 0).all():
        raise TraceError(f"{path}: selects no expert at all")
    return Trace(ids.astype(np.int32), tuple(range(ids.shape[1])))


def _read_csv(path: Path, columns: Columns, limit: int) -> Trace:
    bounds = {
        columns.token: (0, np.iinfo(np.int64).max, "a token must be 0 or more"),
        columns.layer: (0, INT32_MAX, f"a layer must be in [0, {INT32_MAX}]"),
        columns.expert: (-1, limit - 1, _range(limit)),
    }
    if columns.lane is not None:
        bounds[columns.lane] = (0, np.iinfo(np.int64).max, "a lane must be 0 or more")
    if len(bounds) != len([name for name in columns if name is not None]):
        raise TraceError(f"{path}: one column has two meanings: {', '.join(filter(None, columns))}")
    values = [array("q") for _ in bounds]
    # A byte that is no UTF-8 matters only where a number should stand.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = _lines(path, csv.reader(file))
        _, header = next(lines, (1, []))
        places = _places(path, header, list(bounds))
        fields = list(zip(places, bounds.items(), values, strict=True))
        for number, line in lines:
            for place, (name, (low, high, allowed)), column in fields:
                where = f"{path}: line {number}, field {name!r}: "
                if place >= len(line):
                    raise TraceError(f"{where}missing: the line has {len(line)} fields")
                text = line[place].strip()
                if not INTEGER.fullmatch(text):
                    raise TraceError(f"{where}{text!r} is no integer")
                value = int(text)
                if not low <= value <= high:
                    raise TraceError(f"{where}{value}: {allowed}")
                column.append(value)
    if not values[0]:
        raise TraceError(f"{path}: no line after the header")
    return _checked_groups(path, [np.asarray(column) for column in values], limit)


def _lines(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Lines of a `csv.reader` that are not blank, with their numbers."""
    while True:
        try:
            line = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TraceError(f"{path}: line {reader.line_num}: {error}") from None
        if line:
            yield reader.line_num, line


def _places(path: Path, header: Sequence[str], names: Sequence[str]) -> list[int]:
    """Where the named columns stand."""
    header = [name.strip() for name in header]
    for name in names:
        if header.count(name) != 1:
            raise TraceError(
                f"{path}: line 1, field {name!r}: {header.count(name) or 'no'} such columns among "
                f"{', '.join(header) or 'none'}; flags name them"
            )
    return [header.index(name) for name in names]


def _checked_groups(path: Path, columns: Sequence[np.ndarray], limit: int) -> Trace:
    tokens, layers, experts, *lanes = columns
    names, token = np.unique(tokens, return_inverse=True)
    layer_names, layer = np.unique(layers, return_inverse=True)
    if len(layer_names) > MAX_LAYERS:
        raise TraceError(f"{path}: layers must be at most {MAX_LAYERS}, got {len(layer_names)}")
    order = np.lexsort((*lanes, layer, token))
    step = (token * len(layer_names) + layer)[order]
    lane = np.arange(len(step)) - np.searchsorted(step, step)
    if lane.max() >= MAX_WIDTH:
        full = order[int(np.argmax(lane))]
        raise TraceError(
            f"{path}: token {tokens[full]}, layer {layers[full]}: {lane.max() + 1} lines, "
            f"more than {MAX_WIDTH} experts"
        )
    ids = np.full((len(names), len(layer_names), int(lane.max()) + 1), -1, np.int32)
    ids[token[order], layer[order], lane] = experts[order]
    return Trace(_checked(path, ids, limit).ids, tuple(layer_names.tolist()))
