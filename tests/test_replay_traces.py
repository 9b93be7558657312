"""Reading of routing traces, every way a file can be malformed, and the synthetic ones."""

import re

import numpy as np
import pytest

from bench import policies, traces
from bench.budgets import Geometry
from bench.synthetic import Synthetic, generate
from bench.traces import TraceError, read

IDS = np.array([[[3, 0], [1, 2]], [[-1, -1], [0, 3]], [[2, 1], [1, -1]]], np.int16)
HEADER = "token,layer,expert\n"


def test_arrays(tmp_path):
    np.save(tmp_path / "a.npy", IDS)
    (tmp_path / "a.npy").rename(tmp_path / "A.NPY")
    np.savez(tmp_path / "one.npz", anything=IDS)
    np.savez_compressed(tmp_path / "two.npz", other=IDS[:1], routed_experts=IDS.astype(np.int64))
    for name in ("A.NPY", "one.npz", "two.npz"):
        trace = read(tmp_path / name)
        assert trace.ids.dtype == np.int32 and np.array_equal(trace.ids, IDS), name
        assert trace.layers == (0, 1)
    assert len(read(tmp_path / "two.npz", name="other").ids) == 1
    np.save(tmp_path / "unsigned.npy", np.abs(IDS).astype(np.uint8))
    assert np.array_equal(read(tmp_path / "unsigned.npy").ids, np.abs(IDS))


def _lines(ids):
    """Token, layer, expert and lane of everything but padding."""
    return [(*at[:2], int(ids[tuple(at)]), at[2]) for at in np.argwhere(ids >= 0).tolist()]


def test_csv_in_any_order(tmp_path):
    lines = _lines(IDS)
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "".join(f"{t},{layer},{e}\n" for t, layer, e, _ in lines))
    assert np.array_equal(read(path).ids, IDS)
    # Other names, other columns, tokens with gaps, layers that start at 3, a byte order mark.
    rng = np.random.default_rng(0)
    text = "\ufeffnote, rank ,step,moe,id\r\n"
    for i in rng.permutation(len(lines)):
        token, layer, expert, lane = lines[i]
        text += f'"x, y",{lane},{10 * token + 7}, {2 * layer + 3} ,{expert}\r\n\r\n'
    path.write_bytes(text.encode() + b"\xff,9,17,5,-1\r\n")
    trace = read(path, columns=traces.Columns("step", "moe", "id", "rank"))
    assert np.array_equal(trace.ids[..., :2], IDS) and (trace.ids[..., 2:] == -1).all()
    assert trace.layers == (3, 5)
    # Without the lanes a step has the same experts, as the file orders them.
    trace = read(path, columns=traces.Columns("step", "moe", "id"))
    assert np.array_equal(np.sort(trace.ids, axis=2)[..., -2:], np.sort(IDS, axis=2))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1, field 'token': no such columns among none; flags name them"),
        ("token,layer\n0,0\n", "line 1, field 'expert': no such columns among token, layer"),
        ("token,layer,expert,layer\n", "line 1, field 'layer': 2 such columns among"),
        (HEADER, "no line after the header"),
        (HEADER + "0,0,1\n\n1,0,x\n", "line 4, field 'expert': 'x' is no integer"),
        (HEADER + "0,0,1\n1,0.5,1\n", "line 3, field 'layer': '0.5' is no integer"),
        (HEADER + "0,0,1\n1,0\n", "line 3, field 'expert': missing: the line has 2 fields"),
        (HEADER + ",0,1\n", "line 2, field 'token': '' is no integer"),
        (HEADER + "9999999999999999999,0,1\n", "line 2, field 'token': '9999999999999999999' is"),
        (HEADER + "-1,0,1\n", "line 2, field 'token': -1: a token must be 0 or more"),
        (HEADER + "0,-2,1\n", "line 2, field 'layer': -2: a layer must be in [0, 2147483647]"),
        (HEADER + "0,0,-2\n", "line 2, field 'expert': -2: an expert id must be in [-1, 65536); -"),
        (HEADER + "0,0,65536\n", "line 2, field 'expert': 65536: an expert id must be in [-1, 65"),
        (HEADER + "0,0,-1\n", "selects no expert at all"),
        (HEADER + "0,0," + "1" * 200_000 + "\n", "line 2: field larger than field limit"),
        (HEADER + "0,4,1\n" * 1025, "token 0, layer 4: 1025 lines, more than 1024 experts"),
    ],
)
def test_malformed_csv(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=re.escape(f"{path}: {message}")):
        read(path)


def test_experts_bound_the_ids(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(HEADER + "0,0,70000\n")
    assert read(path, experts=70001).ids.max() == 70000
    with pytest.raises(TraceError, match=r"line 2, field 'expert': 70000: .* in \[-1, 70000\)$"):
        read(path, experts=70000)
    with pytest.raises(TraceError, match="one column has two meanings: token, token, expert"):
        read(path, columns=traces.Columns(layer="token"))


@pytest.mark.parametrize(
    "array, message",
    [
        (IDS.astype(np.float32), "dtype must be an integer, got float32"),
        (IDS[0], "shape must be [tokens, layers, top_k], none of them 0, got [2, 2]"),
        (IDS[:0], "shape must be [tokens, layers, top_k], none of them 0, got [0, 2, 2]"),
        (
            np.where(IDS == 2, 4, IDS),
            "token 0, layer 1, lane 1: 4: an expert id must be in [-1, 4)",
        ),
        (np.where(IDS == -1, -2, IDS), "token 1, layer 0, lane 0: -2: an expert id must be in"),
        (np.full((1, 1, 1025), 1), "top_k must be at most 1024, got 1025"),
        (np.full((1, 2**15 + 1, 1), 1), "layers must be at most 32768, got 32769"),
        (np.full((2, 2, 2), -1), "selects no expert at all"),
        (
            np.array([[[{}]]], object),
            "no array that NumPy can read: Object arrays cannot be loaded",
        ),
    ],
)
def test_malformed_arrays(tmp_path, array, message):
    path = tmp_path / "bad.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(TraceError, match=re.escape(f"{path}: {message}")):
        read(path, experts=4)


def test_malformed_files(tmp_path):
    def refused(file, message, **options):
        with pytest.raises(TraceError, match=re.escape(f"{tmp_path / file}: {message}")):
            read(tmp_path / file, **options)

    refused("missing.npy", "No such file or directory")
    refused("missing.csv", "No such file or directory")
    refused("trace.txt", "a trace is a .npy, .npz or .csv file, not '.txt'")
    (tmp_path / "folder.npy").mkdir()
    refused("folder.npy", "Is a directory")
    for name in ("empty.npy", "empty.npz"):
        (tmp_path / name).write_bytes(b"")
        refused(name, "no array that NumPy can read")
    np.savez(tmp_path / "two.npz", a=IDS, b=IDS)
    refused("two.npz", "--array must name one of a, b")
    refused("two.npz", "no array 'c' among a, b", name="c")
    for name in ("cut.npy", "cut.npz"):
        saved = tmp_path / f"whole{name[-4:]}"
        (np.save if name.endswith("npy") else np.savez)(saved, IDS)
        (tmp_path / name).write_bytes(saved.read_bytes()[:-9])
        refused(name, "no array that NumPy can read")


def test_inferred_experts():
    def trace(largest):
        return traces.Trace(np.array([[[largest]]]), (0,))

    assert [traces.inferred_experts(trace(n)) for n in (0, 1, 2, 7, 8)] == [1, 2, 4, 8, 16]
    assert traces.inferred_experts(trace(3), trace(100)) == 128


def test_selected_lanes():
    ids = np.array([[[2, -1, 2, 0], [-1, -1, 5, 5]]])
    assert traces.selected_lanes(ids).tolist() == [[[1, 0, 0, 1], [0, 0, 1, 0]]]


def test_synthetic_traces_have_the_locality_that_they_are_given():
    def hit_rate(**spec):
        ids = generate(Synthetic(tokens=100, layers=3, experts=32, **spec)).ids
        pool = Geometry(3, 32, 4).pool(3 * 8)
        return policies.least_recent(pool, ids, [range(8)] * 3).hit_rate

    assert hit_rate(zipf=0, reuse=0) == pytest.approx(25, abs=3)  # 8 of 32, whatever the policy.
    assert (
        hit_rate(zipf=0, reuse=0) + 10 < hit_rate(zipf=0, reuse=0.5) < hit_rate(zipf=0, reuse=0.9)
    )
    assert hit_rate(zipf=0, reuse=0) + 10 < hit_rate(zipf=1, reuse=0) < hit_rate(zipf=2, reuse=0)
    constant = generate(Synthetic(tokens=5, reuse=1)).ids
    assert (np.sort(constant, 2) == np.sort(constant[:1], 2)).all()


def test_synthetic_specifications():
    spec = Synthetic.parse(["tokens=7", "experts=9", "top_k=3", "zipf=0.5", "seed=4"])
    assert spec == Synthetic(tokens=7, experts=9, top_k=3, zipf=0.5, seed=4)
    trace = generate(spec)
    assert trace.ids.shape == (7, 16, 3) and trace.layers == tuple(range(16))
    assert traces.selected_lanes(trace.ids).all() and trace.ids.max() < 9
    assert np.array_equal(trace.ids, generate(spec).ids)
    assert not np.array_equal(trace.ids, generate(spec._replace(seed=5)).ids)
    for item, message in [
        (
            "token=7",
            "'token=7' is none of tokens=, layers=, experts=, top_k=, zipf=, reuse=, seed=",
        ),
        ("tokens", "'tokens': '' is no int"),
        ("zipf=a", "'zipf=a': 'a' is no float"),
        ("layers=0", "layers must be at least 1, got 0"),
        ("experts=3", "experts must be at least top_k, 4, got 3"),
        ("reuse=1.5", "reuse must be in [0, 1], got 1.5"),
        ("zipf=nan", "zipf must be finite and at least 0, got nan"),
        ("seed=-1", "seed must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Synthetic.parse([item])
