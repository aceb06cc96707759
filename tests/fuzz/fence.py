"""Fuzzer of operators: does a kernel access only the memory of its tensors?

``python -m tests.fuzz.fence --seconds 600`` calls each operator on the closed list with arguments
that its contract and its meta kernel accept. Each tensor ends at an unmapped page or starts after
one. If there is a C compiler, torch's own allocations do so too, and are filled with a pattern
(fence.c). Each call is made twice, with two patterns. Findings are: a crash of a child process
(its last call is in shared memory), an answer that depends on the pattern (so the kernel did not
write it), a changed input, and extents that differ from those of the call without data.

``--inner`` makes calls that contracts accept but torch refuses on meta tensors. Between the ends
of a program's ranges, only contracts check the first run of a shape (docs/adr/0024).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from pipeswitch.programs.graphs.contracts import BrokenContract, contracted, guarded
from pipeswitch.programs.graphs.graph import resolve
from pipeswitch.programs.graphs.operators import BY_CONTRACT, OVERLOADS

HERE: Final = Path(__file__).parent
PAGE: Final = mmap.PAGESIZE
SLOT_PAGES: Final = 16
SLOTS: Final = 24
PATTERNS: Final = (0x5A, 0xA7)
RESIDENCY, VALUES = 8, 8  # number of memory layouts per call, number of sets of values per layout
TRIES: Final = 8  # attempts to find arguments that are accepted
REGIONS: Final = 20_000  # a child ends after this many large allocations; Linux allows some 30,000
FLOATS: Final = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES: Final = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
LAST_CALL_BYTES: Final = 4096
ODD_FLOATS: Final = (
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    3e38,
    -1e30,
    2.0**31,
    -(2.0**63),
    1e-40,
)
ODD_INTEGERS: Final = (-(1 << 63), -(1 << 31), 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1)
ODDITY: Final = 1 / 16  # probability that a tensor has odd values, or that an argument is odd
WITHOUT_END: Final = frozenset({"sections"})  # never odd: a huge number of views fills memory
TARGETS: Final = sorted(f"aten.{n}.{o}" for n, suffixes in OVERLOADS.items() for o in suffixes)


class T:
    """Specification of a tensor: extents, dtype, and, for indices, their upper bound."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, bound: int = 0) -> None:
        self.shape, self.dtype, self.bound = tuple(shape), dtype, bound

    def __repr__(self) -> str:
        return f"{str(self.dtype)[6:]}{list(self.shape)}"


# ---- arguments --------------------------------------------------------------------------------


@dataclass
class Wish:
    """Properties that all arguments of one call have in common."""

    rng: random.Random
    shape: list[int]
    dtype: torch.dtype

    def extent(self, most: int = 6) -> int:
        return self.rng.randint(1, most)


def of_family(name: str, wish: Wish) -> dict[str, Any]:
    """Return matching arguments for an operator whose tensors' extents depend on each other."""
    r, f = wish.rng, r_float(wish)
    e, is_wide = wish.extent, r.random() < 0.2
    n, c, s = e(4), r.choice([16, 33]) if is_wide else e(9), [e(9) for _ in range(3)]
    if name in ("batch_norm", "_native_batch_norm_legit_no_training", "instance_norm"):
        each = T([c], f)
        return {
            "input": T([n, c, *s[: r.randint(0, 3)]], f),
            "weight": r.choice([None, each]),
            "bias": r.choice([None, each]),
            "running_mean": each,
            "running_var": each,
            "training": False,
            "use_input_stats": r.random() < 0.5,
        }
    if name in ("layer_norm", "rms_norm", "native_layer_norm"):
        last = s[: r.randint(1, 2)]
        return {
            "input": T([n, c, *last], f),
            "normalized_shape": last,
            "weight": r.choice([None, T(last, f)]),
            "bias": r.choice([None, T(last, f)]),
        }
    if name in ("group_norm", "native_group_norm"):
        g, inner = e(3), s[: r.randint(1, 2)]
        hw = inner[0] * (inner[1] if len(inner) > 1 else 1)
        c *= g
        return {
            "input": T([n, c, *inner], f),
            "num_groups": g,
            "group": g,
            "N": n,
            "C": c,
            "HxW": hw,
            "weight": r.choice([None, T([c], f)]),
            "bias": r.choice([None, T([c], f)]),
        }
    if name == "_weight_norm":
        shape, dim = [c, *s[:2]], r.choice([0, 2])
        return {
            "v": T(shape, f),
            "dim": dim,
            "g": T([x if i == dim else 1 for i, x in enumerate(shape)], f),
        }
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        gates, layers, ways = {"lstm": 4, "gru": 3}.get(name, 1), e(2), e(2)
        first, biases, width, hidden = r.random() < 0.5, r.random() < 0.5, e(9), e(9)
        params = []
        for layer in range(layers):
            for _ in range(ways):
                inner = width if layer == 0 else hidden * ways
                params += [T([gates * hidden, inner], f), T([gates * hidden, hidden], f)]
                params += [T([gates * hidden], f)] * 2 if biases else []
        state = T([layers * ways, n, hidden], f)
        return {
            "input": T([n, c, width] if first else [c, n, width], f),
            "params": params,
            "hx": [state, state] if name == "lstm" else state,
            "has_biases": biases,
            "num_layers": layers,
            "dropout": 0.0,
            "train": False,
            "bidirectional": ways == 2,
            "batch_first": first,
        }
    if name in ("lstm_cell", "gru_cell"):
        gates, hidden = 4 if name == "lstm_cell" else 3, e(9)
        state, bias = T([n, hidden], f), r.choice([None, T([gates * hidden], f)])
        return {
            "input": T([n, c], f),
            "hx": [state, state] if gates == 4 else state,
            "w_ih": T([gates * hidden, c], f),
            "w_hh": T([gates * hidden, hidden], f),
            "b_ih": bias,
            "b_hh": bias,
        }
    if name == "linear":
        return {
            "input": T([n, c][r.randint(0, 1) :], f),
            "weight": T([s[0], c], f),
            "bias": r.choice([None, T([s[0]], f)]),
        }
    if "conv" in name:
        axes = int(name[-2]) if name[-1] == "d" else r.randint(1, 3)
        g, transposed = e(2), name.startswith("conv_t") or (name[-1] != "d" and r.random() < 0.5)
        k = [e(5 if is_wide else 3) for _ in range(axes)]
        out = (16 if is_wide else e(4)) * g
        c *= g
        weight = [c, out // g, *k] if transposed else [out, c // g, *k]
        return {
            "input": T([n, c, *[x + 2 for x in s[:axes]]], f),
            "weight": T(weight, f),
            "bias": r.choice([None, T([out], f)]),
            "stride": [e(9 if is_wide else 3)] * axes,
            "padding": [r.randint(0, 9 if is_wide else 2)] * axes,
            "dilation": [e(4 if is_wide else 2)] * axes,
            "groups": g,
            "transposed": transposed,
            "output_padding": [r.randint(0, 1)] * axes,
        }
    if "pool" in name and "unpool" not in name:
        axes = int(name.partition("pool")[2][0])
        k = [e(3) for _ in range(axes)]
        return {
            "self": T([n, c, *[x + 2 for x in s[:axes]]], f),
            "kernel_size": k,
            "stride": [e(3) for _ in k],
            "padding": [r.randint(0, x // 2) for x in k],
            "dilation": [e(2) for _ in k],
            "ceil_mode": r.random() < 0.5,
            "output_size": [e() for _ in k],
            "divisor_override": r.choice([None, 3]),
        }
    if "upsample" in name:
        axes = next(int(x) for x in name if x.isdigit())
        value, scale = T([n, c, *s[:axes]], f), r.choice([None, 0.3, 1.7, 2.0])
        sizes = [int(x * (scale or e(3))) for x in s[:axes]]
        by_factor = scale is not None and r.random() < 0.5
        return {
            "self": value,
            "input": value,
            "output_size": sizes,
            "scales": scale,
            "scales_d": scale,
            "scales_h": scale,
            "scales_w": scale,
            "scale_factors": None,
            **({"output_size": None, "scale_factors": [scale] * axes} if by_factor else {}),
        }
    if name == "max_unpool2d":
        return {
            "self": T([n, c, *s[:2]], f),
            "output_size": [s[0] * 2, s[1] * 2],
            "indices": T([n, c, *s[:2]], torch.int64, s[0] * s[1] * 4),
        }
    if name.startswith("grid_sampler"):
        axes = int(name[-2]) if name[-1] == "d" else r.choice([2, 3])
        return {
            "input": T([n, c, *s[:axes]], f),
            "grid": T([n, *[e(9) for _ in range(axes)], axes], f),
            "interpolation_mode": r.randint(0, 2),
            "padding_mode": r.randint(0, 2),
        }
    if name == "affine_grid_generator":
        axes = r.choice([2, 3])
        return {"theta": T([n, axes, axes + 1], f), "size": [n, c, *s[:axes]]}
    if name in ("im2col", "col2im"):
        k, st, p, d = [e(3), e(3)], [e(2), e(2)], [r.randint(0, 1)] * 2, [e(2), e(2)]
        o = [x + 4 for x in s[:2]]
        count = [(o[i] + 2 * p[i] - d[i] * (k[i] - 1) - 1) // st[i] + 1 for i in (0, 1)]
        value = (
            T([n, c, *o], f)
            if name == "im2col"
            else T([n, c * k[0] * k[1], count[0] * count[1]], f)
        )
        return {
            "self": value,
            "output_size": o,
            "kernel_size": k,
            "stride": st,
            "padding": p,
            "dilation": d,
        }
    if "pad" in name and name != "pad" and name != "constant_pad_nd":
        axes = int(name[-2])
        return {
            "self": T([n, c, *[x + 2 for x in s[:axes]]], f),
            "padding": [r.randint(-5, 5) for _ in range(2 * axes)],
        }
    if name == "pad":
        mode, axes = r.choice(["constant", "reflect", "replicate", "circular"]), r.randint(1, 3)
        return {
            "self": T([n, c, *[x + 2 for x in s[:axes]]], f),
            "mode": mode,
            "value": None,
            "pad": [r.randint(-5, 5) for _ in range(2 * axes)],
        }
    if name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        k = e(3)
        return {
            "self": T([n, c * k * k, s[0] * k, s[1] * k], f),
            "upscale_factor": k,
            "downscale_factor": k,
            "groups": k,
        }
    if name == "embedding":
        return {"weight": T([c, s[0]], f), "indices": T([n, s[1]], torch.int64, c)}
    if name.startswith(("gather", "scatter", "take_along")):
        shape, dim = [n, c, s[0]], r.randint(-3, 2)
        index = T([e(x) for x in shape], torch.int64, shape[dim])
        return {
            "self": T(shape, f),
            "dim": dim,
            "index": index,
            "indices": index,
            "src": T(index.shape, f),
            "value": 1,
            "sparse_grad": False,
            "reduce": r.choice(["sum", "prod", "mean", "amax", "amin", "add", "multiply"]),
        }
    if name.startswith("index_") and not name.startswith("index_put"):
        shape, dim, k = [n, c, s[0]], r.randint(-3, 2), e(9)
        source = list(shape)
        source[dim] = k
        return {
            "self": T(shape, f),
            "dim": dim,
            "index": T([k], r.choice([torch.int64, torch.int32]), shape[dim]),
            "source": T(source, f),
            "value": T([], f) if r.random() < 0.5 else 1.0,
        }
    if name.startswith("index"):
        shape, k = [n, c, s[0]], e(9)
        indices: list[Any] = [r.choice([None, T([k], torch.int64, x)]) for x in shape]
        return {"self": T(shape, f), "indices": indices[: r.randint(1, 3)], "values": T([1], f)}
    if name == "one_hot":
        return {"self": T([n, c], torch.int64, s[0]), "num_classes": s[0]}
    if name == "bucketize":
        return {"self": T([n, c], f), "boundaries": T([s[0]], f)}
    if name == "prelu":
        return {"self": T([n, c, s[0]], f), "weight": T([r.choice([1, c])], f)}
    if name == "scaled_dot_product_attention":
        heads, many, width = e(3), e(40), r.choice([1, 3, 8, 16, 64])
        mask = r.choice(
            [None, T([1, 1, c, many], f), T([c, many], torch.bool), T([n, heads, c, many], f)]
        )
        return {
            "query": T([n, heads, c, width], f),
            "key": T([n, heads, many, width], f),
            "value": T([n, heads, many, r.choice([width, s[0]])], f),
            "attn_mask": mask,
            "dropout_p": 0.0,
            "is_causal": mask is None and r.random() < 0.5,
            "scale": None,
            "enable_gqa": False,
        }
    if name in ("addmm", "mm", "mv", "addmv", "bmm", "baddbmm", "dot", "vdot", "outer", "matmul"):
        lead = [n] if "bmm" in name else []
        vector, left, right = T([c], f), T([*lead, s[0], c], f), T([*lead, c, s[1]], f)
        return {
            "self": {
                "addmm": T([s[1]], f),
                "addmv": T([s[0]], f),
                "baddbmm": T([n, s[0], s[1]], f),
            }.get(name, vector if name in ("dot", "vdot", "outer") else left),
            "mat1": left,
            "mat2": right,
            "batch1": left,
            "batch2": right,
            "mat": left,
            "vec": vector,
            "vec2": T([s[0]], f),
            "tensor": vector,
            "other": vector if name == "vdot" else right,
        }
    if name == "einsum":
        return {"equation": "ij,jk->ik", "tensors": [T([n, c], f), T([c, s[0]], f)], "path": None}
    if name == "diag_embed":
        return {"offset": r.randint(-2, 2), "dim1": -2, "dim2": -1}
    if name.startswith("view_as_complex"):
        return {"self": T([n, c, 2], torch.float32)}
    return {}


def r_float(wish: Wish) -> torch.dtype:
    return wish.dtype if wish.dtype.is_floating_point else torch.float32


def argument(entry: Any, wish: Wish, target: str) -> Any:
    """Return an argument of the schema's type; the shapes of a call's tensors can be broadcast."""
    kind, r, rank = str(entry.type), wish.rng, len(wish.shape)
    is_odd = r.random() < ODDITY and entry.name not in WITHOUT_END
    if entry.has_default_value() and r.random() < 0.5:
        return entry.default_value
    if kind.startswith("Optional") and r.random() < 0.4:
        return None
    if "Tensor" in kind and "List" in kind:
        return [T(wish.shape, wish.dtype) for _ in range(wish.extent(3))]
    if "Tensor" in kind:
        shape = wish.shape
        if r.random() < 0.25:
            shape = [r.choice([extent, 1]) for extent in shape][r.randint(0, rank) :]
        return T(shape, torch.bool if entry.name in ("mask", "condition") else wish.dtype)
    if "bool" in kind:
        return r.random() < 0.5
    if "List[int]" in kind or "List[SymInt]" in kind:
        if entry.name in ("dim", "dims", "shifts"):
            return r.sample(range(rank), r.randint(min(1, rank), rank))
        if entry.name in ("size", "shape", "repeats", "sizes"):
            return r.choice([list(wish.shape), [-1], [wish.extent(3) for _ in range(rank + 1)]])
        return [r.choice(ODD_INTEGERS) if is_odd else r.randint(0, 3) for _ in range(max(rank, 1))]
    if "str" in kind:
        return r.choice(["trunc", "floor", "none", "tanh", "ij", "xy"])
    if "float" in kind or "number" in kind or "Scalar" in kind:
        return r.choice([*ODD_FLOATS, *ODD_INTEGERS] if is_odd else [0, 1, 2, -1, 0.5, 3.0])
    if "int" in kind and entry.name in ("dtype", "layout", "memory_format"):
        return None
    if "int" in kind:
        if is_odd:
            return r.choice(ODD_INTEGERS)
        return r.randint(-rank, max(rank - 1, 0)) if "dim" in entry.name else r.randint(-1, 5)
    return None


def arguments(target: str, schema: Any, seed: int) -> dict[str, Any]:
    """Return all arguments of a call. One call in eight has one argument replaced at random."""
    rng = random.Random(seed)
    rank = rng.choice([0, 1, 2, 2, 3, 3, 4])
    shape = [rng.choice([1, 2, 3, 4, 5, 7, 8, 17, 33]) for _ in range(rank)]
    wish = Wish(rng, shape, rng.choice(DTYPES))
    arguments_of = of_family(target.split(".")[1], wish)
    entries = {entry.name: entry for entry in schema.arguments}
    options = {}
    for name, entry in entries.items():
        kind = str(entry.type)
        if name in ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"):
            if not entry.has_default_value():
                options[name] = {"device": torch.device("cpu"), "dtype": rng.choice(FLOATS)}.get(
                    name
                )
            elif name == "dtype" and rng.random() < 0.2:
                options[name] = rng.choice(DTYPES)
            continue
        value = arguments_of[name] if name in arguments_of else argument(entry, wish, target)
        if isinstance(value, T) and "Tensor" not in kind:
            value = 1
        options[name] = value
    if rng.random() < 0.125 and options:
        name = rng.choice(sorted(options))
        options[name] = argument(entries[name], wish, target)
    return options


# ---- memory -----------------------------------------------------------------------------------


class Values:
    """Data for tensors: long random arrays, made once; each call takes a random piece of one."""

    LENGTH: Final = 1 << 16

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._made: dict[tuple[torch.dtype, int, bool], bytes] = {}

    def piece(self, spec: T, size: int, rng: random.Random) -> bytes:
        """Return ``size`` bytes, sometimes with odd values or indices that a kernel must refuse."""
        key = spec.dtype, spec.bound, rng.random() < ODDITY
        values = self._made.get(key)
        if values is None:
            self._made[key] = values = self._make(*key)
        item = spec.dtype.itemsize
        first = rng.randrange((len(values) - size) // item + 1) * item
        return values[first : first + size]

    def _make(self, dtype: torch.dtype, bound: int, is_hostile: bool) -> bytes:
        count, generator = self.LENGTH // dtype.itemsize, self._generator
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(count, generator=generator)
            if is_hostile:
                odd = torch.tensor(ODD_FLOATS)
                values[::3] = odd[torch.arange(len(values[::3])) % len(odd)]
            return raw(values.to(dtype))
        if is_hostile and not bound:  # in a request, the byte of a bool may have any value
            low, high = (0, 256) if dtype is torch.bool else (-2, 2)
            values = torch.randint(low, high, (count,), generator=generator)
            if dtype is torch.bool:
                return raw(values.to(torch.uint8))
            return raw(torch.where(values == 1, torch.iinfo(dtype).min, values).to(dtype))
        high = 2 if dtype is torch.bool else max(bound, 1) if bound else 5
        low, high = (-2 * high - 1, 2 * high + 1) if is_hostile else (0, high)
        return raw(torch.randint(low, high, (count,), generator=generator).to(dtype))


class Place:
    """Memory of one tensor, and the bytes last written there, also between strided elements."""

    def __init__(self, tensor: torch.Tensor, memory: memoryview, spec: T) -> None:
        self.tensor, self._memory, self._wanted = tensor, memory, spec
        self._written = b""

    def fill(self, values: Values, rng: random.Random) -> None:
        self._written = values.piece(self._wanted, len(self._memory), rng)

    def write(self) -> None:
        self._memory[:] = self._written

    @property
    def is_unchanged(self) -> bool:
        return self._memory.tobytes() == self._written


class Fence:
    """Slots of memory, each between two unmapped pages."""

    SIZE: Final = SLOT_PAGES * PAGE

    def __init__(self) -> None:
        self._slots: list[tuple[torch.UntypedStorage, memoryview]] = []
        self._maps: list[mmap.mmap] = []
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in range(SLOTS):
            whole = mmap.mmap(-1, self.SIZE + 2 * PAGE)
            inner = memoryview(whole)[PAGE : self.SIZE + PAGE]
            storage = torch.frombuffer(inner, dtype=torch.uint8).untyped_storage()
            start = storage.data_ptr()
            for page in (start - PAGE, start + self.SIZE):
                if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0):
                    raise OSError(ctypes.get_errno(), "mprotect")
            self._slots.append((storage, inner))
            self._maps.append(whole)
        self._next = 0

    def rewind(self) -> None:
        self._next = 0

    def place(self, spec: T, rng: random.Random) -> Place:
        """Place a tensor at the end or start of a slot, or up to 64 bytes away from it.

        Raises:
            ValueError: the tensor is larger than a slot.
        """
        storage, memory = self._slots[self._next]
        self._next += 1
        item, shape = spec.dtype.itemsize, spec.shape
        strides, order = [1] * len(shape), list(range(len(shape)))
        if rng.random() < 0.3:
            rng.shuffle(order)
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step *= max(shape[axis], 1)
        if shape and rng.random() < 0.1:
            strides = [2 * stride for stride in strides]
        if shape and rng.random() < 0.1:  # elements overlap, as in a result of ``expand``
            strides = [rng.choice([0, stride]) for stride in strides]
        last = (
            sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else -1
        )
        used = (last + 1) * item
        if used > self.SIZE:
            raise ValueError("larger than a slot")
        near = rng.choice([0, 0, 0, 0, rng.randint(1, 64)]) // item * item
        room = (self.SIZE - used) // item * item
        first = min(near, room) if rng.random() < 0.3 else max(0, room - near)
        tensor = torch.empty(0, dtype=spec.dtype).set_(storage, first // item, shape, strides)
        return Place(tensor, memory[first : first + used], spec)


def walk(value: Any, change: Callable[[T], Any]) -> Any:
    if isinstance(value, T):
        return change(value)
    return [walk(item, change) for item in value] if isinstance(value, list) else value


def raw(tensor: torch.Tensor) -> bytes:
    if not (tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()):
        plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        tensor = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size) if size else b""


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for item in value for t in tensors_of(item)] if isinstance(value, list | tuple) else []
    )


def share(target: str) -> int:
    return 4 if target.split(".")[1] in BY_CONTRACT else 1


# ---- one child --------------------------------------------------------------------------------


class _Asked:
    """Call without a computation, so that only its contract is checked."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema

    def __call__(self, /, *args: Any, **kwargs: Any) -> None:
        return None


class Child:
    """Caller of operators in a child process; a mapped file has its last call."""

    def __init__(
        self, last_call: Path, seed: int, only: str = "", *, is_inner: bool = False
    ) -> None:
        self._seed = seed
        self._is_inner = is_inner
        with last_call.open("r+b") as file:
            self._last = mmap.mmap(file.fileno(), LAST_CALL_BYTES)
        self._fence, self._values = Fence(), Values(seed)
        targets = [target for target in TARGETS if target.startswith(f"aten.{only}")]
        self._calls = [(target, resolve(target)) for target in targets]
        self._behind = {target: guarded(call) for target, call in self._calls}
        self._asked = {
            target: contracted(_Asked(call._schema))
            for target, call in self._calls
            if not target.startswith("aten.sym_")
        }
        perturb = ctypes.CDLL(None)
        self._pattern = getattr(perturb, "fence_pattern", lambda byte: perturb.mallopt(-6, byte))
        self._regions = ctypes.c_uint64()
        if hasattr(perturb, "fence_regions"):
            self._regions = ctypes.c_uint64.in_dll(perturb, "fence_regions")
        self.done: dict[str, int] = dict.fromkeys(TARGETS, 0)
        self.findings: list[str] = []

    def run(self, seconds: float, report: Callable[[], None]) -> None:
        """Call operators in turn; call those in BY_CONTRACT, which check no inputs, more often."""
        ends_s = time.monotonic() + seconds
        calls = [c for c in self._calls for _ in range(share(c[0]))]
        random.Random(self._seed).shuffle(calls)
        while True:
            for place, (target, call) in enumerate(calls):
                for _ in range(TRIES):
                    self._seed += 1
                    if self._try(target, call, self._seed):
                        break
                if place % 16 == 0:
                    report()
                    if time.monotonic() > ends_s or self._regions.value > REGIONS:
                        return

    def _try(self, target: str, call: Any, seed: int) -> bool:
        """Return True if the kernel accepted a call with the arguments of this seed."""
        if target.startswith("aten.sym_"):
            return True
        arguments_tried = arguments(target, call._schema, seed)
        on_meta = walk_all(
            arguments_tried, lambda w: torch.empty(w.shape, dtype=w.dtype, device="meta")
        )
        if "device" in on_meta:
            on_meta["device"] = torch.device("meta")
        try:
            if not tensors_of(list(on_meta.values())):
                on_meta["device"] = torch.device("meta")
            promised = self._promised(target, call._schema, on_meta, seed)
        except Exception:  # refused, so such a call never reaches a kernel
            return False
        if sum(t.numel() for t in tensors_of(promised)) > 1 << 16:
            return False
        text = f"{target} {arguments_tried} seed {seed}".encode()[: LAST_CALL_BYTES - 1]
        self._last[: len(text) + 1] = text + b"\0"
        rng, before = random.Random(seed), self.done[target]
        with contextlib.suppress(ValueError):
            for _ in range(RESIDENCY):
                self._call(target, call, arguments_tried, tensors_of(promised), rng)
        return self.done[target] > before

    def _promised(self, target: str, schema: Any, on_meta: dict[str, Any], seed: int) -> Any:
        """Return a call's results on meta tensors. With ``--inner``, return [] if torch refuses the
        call, and raise ValueError if torch accepts it."""
        if not self._is_inner:
            args, kwargs = as_written(schema, on_meta) if seed % 2 else ([], on_meta)
            return self._behind[target](*args, **kwargs)
        self._asked[target](**on_meta)
        try:
            self._behind[target](**on_meta)
        except Exception:
            return []
        raise ValueError("torch accepts it")

    def _call(
        self,
        target: str,
        call: Any,
        arguments_tried: Any,
        promised: list[torch.Tensor],
        rng: random.Random,
    ) -> None:
        """Call the operator with several sets of values in one layout, each with both patterns."""
        self._fence.rewind()
        places: list[Place] = []

        def put(spec: T) -> torch.Tensor:
            places.append(self._fence.place(spec, rng))
            return places[-1].tensor

        actual = walk_all(arguments_tried, put)
        try:
            self._asked[target](**actual)
        except BrokenContract:  # the contract refuses these strides
            return
        inputs = places[1:] if target.split(".")[1].endswith("_") and "__" not in target else places
        extents = [(t.shape, t.dtype) for t in promised]
        for _ in range(VALUES if places else 1):
            for place in places:
                place.fill(self._values, rng)
            answers = []
            for pattern in PATTERNS:
                for place in places:
                    place.write()
                self._pattern(pattern)
                try:
                    result = call(**actual)
                except Exception:  # the kernel itself refuses the call
                    break
                finally:
                    self._pattern(-1)
                tensors = tensors_of(result)[: None if self._is_inner else len(promised)]
                self.done[target] += 1
                answers.append([raw(tensor) for tensor in tensors])
                if not self._is_inner and [(t.shape, t.dtype) for t in tensors] != extents:
                    self._found("other extents than promised")
                if not all(place.is_unchanged for place in inputs):
                    self._found("an input changed")
            if len(answers) == 2 and answers[0] != answers[1]:
                self._found("the answer has memory that was not written")

    def _found(self, what: str) -> None:
        text = bytes(self._last[:]).partition(b"\0")[0].decode()
        if sum(finding.startswith(f"{what}: {text.split()[0]}") for finding in self.findings) < 3:
            self.findings.append(f"{what}: {text}")


def as_written(schema: Any, arguments_by_name: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments as most programs pass them: by position where the schema allows."""
    args, kwargs = [], dict(arguments_by_name)
    for entry in schema.arguments:
        if entry.kwarg_only or not (entry.name in kwargs or entry.has_default_value()):
            break
        args.append(kwargs.pop(entry.name, entry.default_value))
    return args, kwargs


def walk_all(arguments_by_name: dict[str, Any], change: Callable[[T], Any]) -> dict[str, Any]:
    return {name: walk(value, change) for name, value in arguments_by_name.items()}


def child(
    last_call: Path, report: Path, seed: int, seconds: float, only: str, *, is_inner: bool
) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    one = Child(last_call, seed, only, is_inner=is_inner)

    def tell() -> None:  # called often, so that the file has the counts after a crash
        report.write_text(json.dumps({"done": one.done, "findings": one.findings}))

    one.run(seconds, tell)


# ---- the parent -------------------------------------------------------------------------------


def library(folder: Path) -> str:
    """Compile fence.c; return its path. Without a compiler, return "": only inputs are fenced."""
    compiler = shutil.which("cc")
    if compiler is None:
        return ""
    file = folder / "fence.so"
    source = HERE / "fence.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", file, source], check=True)
    return str(file)


def fuzz(seconds: float, seed: int, only: str = "", *, is_inner: bool = False) -> dict[str, Any]:
    """Run one child after the other until the time is over; a child that crashes is a finding."""
    done = dict.fromkeys(TARGETS, 0)
    findings: list[str] = []
    ends_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="pipeswitch-fence-") as name:
        folder = Path(name)
        preloaded = library(folder)
        while (left_s := ends_s - time.monotonic()) > 0:
            last, report = folder / "last", folder / "report.json"
            last.write_bytes(bytes(LAST_CALL_BYTES))
            report.unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.fuzz.fence", "--child", str(last), str(report)]
            command += ["--seed", str(seed), "--seconds", str(left_s)]
            command += ["--only", only, *(["--inner"] if is_inner else [])]
            environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment |= {"LD_PRELOAD": preloaded} if preloaded else {}
            ended = subprocess.run(command, env=environment, cwd=HERE.parents[1], check=False)
            with contextlib.suppress(FileNotFoundError):
                result = json.loads(report.read_text())
                findings += result["findings"]
                done = {target: done[target] + result["done"][target] for target in TARGETS}
            if ended.returncode:
                text = last.read_bytes().partition(b"\0")[0].decode(errors="replace")
                findings.append(f"a crash ({ended.returncode}): {text}")
            seed += 100_000_000
    return {
        "torch": torch.__version__,
        "seconds": round(seconds),
        "inner": is_inner,
        "own_allocations_fenced": bool(preloaded),
        "operators": len(OVERLOADS),
        "executions": sum(done.values()),
        "never_executed": sorted(target for target, count in done.items() if not count),
        "executions_by_operator": done,
        "findings": findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="operators whose name begins so")
    parser.add_argument("--inner", action="store_true", help="what contracts alone let through")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.seed, options.seconds, options.only, is_inner=options.inner)
        return 0
    report = fuzz(options.seconds, options.seed, options.only, is_inner=options.inner)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    for finding in report["findings"][:50]:
        sys.stdout.write(finding + "\n")
    sys.stdout.write(
        f"fence    {report['executions']:,} executions of {report['operators']} operators, "
        f"{len(report['findings'])} findings, {len(report['never_executed'])} overloads never run\n"
    )
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
