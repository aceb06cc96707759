"""Contracts: requirements of the kernels of ``operators.BY_CONTRACT`` on their arguments.

These kernels index one tensor by the extents of another, or use a number without a check. Torch
accepts some arguments on meta (broadcasting a weight, a mode that does not exist) with which the
kernels read or write past a tensor, or leave another tenant's bytes in the result. A contract
requires the extents, dtypes and numbers that torch's own modules pass. It may be stricter than a
kernel needs, but not looser. Contracts do not read the values of tensors, such as indices. Kernels
check each index themselves, and ``make fuzz`` tests that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Final, ParamSpec

import torch

Arguments = Mapping[str, Any]
"""A call's arguments by their names in the schema, with defaults; contracts read no data."""
Contract = Callable[[Arguments], None]

MAX_GEOMETRY: Final = 1 << 16  # kernel sizes, strides, paddings, sizes of images
MIN_SCALE, MAX_SCALE = 1.0 / (1 << 16), float(1 << 16)
INDICES: Final = frozenset({torch.int64, torch.int32})


class BrokenContract(ValueError):
    """A call breaks its contract: torch may accept it, but the kernel is unsafe with it."""


def _need(is_met: bool, text: str) -> None:
    if not is_met:
        raise BrokenContract(text)


_Options = ParamSpec("_Options")


def _with_options(
    check: Callable[Concatenate[Arguments, _Options], None],
) -> Callable[_Options, Contract]:
    """Return a function that takes the options of ``check`` and returns a contract."""
    return lambda *options, **named: lambda args: check(args, *options, **named)


@_with_options
def _all_of(args: Arguments, *contracts: Contract) -> None:
    for contract in contracts:
        contract(args)


def _tensors(args: Arguments, names: Iterable[str]) -> dict[str, torch.Tensor]:
    return {name: args[name] for name in names if args.get(name) is not None}


@_with_options
def _extents(args: Arguments, /, **patterns: str) -> None:
    """Require extents by pattern: equal letters mean equal extents, a final ``*`` any rest."""
    split = {name: pattern.split() for name, pattern in patterns.items()}
    known: dict[str, int] = {}
    for name, tensor in _tensors(args, split).items():
        pattern, shape = split[name], tuple(tensor.shape)
        is_open = pattern[-1:] == ["*"]
        named = pattern[:-1] if is_open else pattern
        fits = len(shape) >= len(named) if is_open else len(shape) == len(named)
        fits = fits and all(
            extent == (int(letter) if letter.isdigit() else known.setdefault(letter, extent))
            for letter, extent in zip(named, shape, strict=False)
        )
        _need(fits, f"{name} has shape {list(shape)}, needed [{patterns[name]}] with {known}")


@_with_options
def _floats(args: Arguments, *names: str, mixed: bool = False) -> None:
    """Require one floating dtype; ``mixed``: parameters may be float32 if the input is half."""
    dtypes = [tensor.dtype for tensor in _tensors(args, names).values()]
    first = dtypes[0]
    is_half = first in (torch.float16, torch.bfloat16)
    others = {first, torch.float32} if mixed and is_half else {first}
    _need(first.is_floating_point, f"{names[0]} is {first}")
    _need(set(dtypes) <= others, f"{', '.join(names)} are of different dtypes")
    _need(len(set(dtypes[1:])) <= 1, f"{', '.join(names[1:])} are of different dtypes")


@_with_options
def _indices(args: Arguments, *names: str) -> None:
    for name, tensor in _tensors(args, names).items():
        _need(tensor.dtype in INDICES, f"{name} is {tensor.dtype}, not a type of indices")


@_with_options
def _numbers(args: Arguments, low: int, high: int, *names: str) -> None:
    """Require integers, or lists of integers, from ``low`` to ``high``."""
    for name in names:
        value = args.get(name)
        if value is not None:
            numbers = value if isinstance(value, list | tuple) else [value]
            is_within = all(type(n) is int and low <= n <= high for n in numbers)
            _need(is_within, f"{name} is {value}, needed {low} to {high}")


def _is(name: str, *values: Any) -> Contract:
    return lambda args: _need(
        any(args[name] is v or (args[name] == v and type(args[name]) is type(v)) for v in values),
        f"{name} is {args[name]}, needed {' or '.join(map(str, values))}",
    )


def _dims(name: str, *counts: int) -> Contract:
    return lambda args: _need(
        args[name].dim() in counts, f"{name} has {args[name].dim()} dimensions, needed {counts}"
    )


@_with_options
def _not_empty(args: Arguments, *names: str) -> None:
    for name, tensor in _tensors(args, names).items():
        _need(tensor.numel() > 0, f"{name} is empty")


def _not_repeated(args: Arguments) -> None:
    """Refuse a value with a stride of 0, such as ``expand`` makes: the kernel uses only extents."""
    value = args["self"]
    pairs = zip(value.shape, value.stride(), strict=True)
    _need(all(n == 1 or stride for n, stride in pairs), f"it has strides {list(value.stride())}")


def _division(args: Arguments) -> None:
    """Refuse truncating division of integers unless the divisor is a positive number.
    The processor ends a process that divides the smallest integer by -1."""
    value, divisor = args["self"], args["other"]
    dtype = torch.result_type(value, divisor)
    if args.get("rounding_mode") == "trunc" and not (dtype.is_floating_point or dtype.is_complex):
        is_known = type(divisor) is int and 0 < divisor <= torch.iinfo(dtype).max
        _need(is_known, "integers are cut towards zero by what is not a positive number")


# ---- normalisation ----------------------------------------------------------------------------

_PER_CHANNEL: Final = _extents(
    input="N C *", weight="C", bias="C", running_mean="C", running_var="C"
)
_CHANNEL_FLOATS: Final = _floats(
    "input", "weight", "bias", "running_mean", "running_var", mixed=True
)


def _trailing(args: Arguments) -> None:
    """Require, for layer_norm, that the input's shape ends in the parameters' shape."""
    normal, shape = list(args["normalized_shape"]), list(args["input"].shape)
    _need(0 < len(normal) <= len(shape), f"normalized_shape is {normal}")
    _need(shape[len(shape) - len(normal) :] == normal, f"input {shape} does not end in {normal}")
    _need(min(normal) > 0, f"normalized_shape is {normal}")
    for name, tensor in _tensors(args, ("weight", "bias")).items():
        _need(list(tensor.shape) == normal, f"{name} is {list(tensor.shape)}, needed {normal}")


@_with_options
def _grouped(args: Arguments, count: str) -> None:
    groups, channels = args[count], args["input"].shape[1]
    _need(0 < groups <= channels and channels % groups == 0, f"{channels} in {groups} groups")


def _flattened(args: Arguments) -> None:
    """Require that N, C and HxW match the input: native_group_norm does not check them."""
    value = args["input"]
    _need(list(value.shape[:2]) == [args["N"], args["C"]], "N and C are not the input's")
    _need(args["N"] * args["C"] * args["HxW"] == value.numel(), "HxW is not the input's")


def _weight_norm(args: Arguments) -> None:
    v, g, dim = args["v"], args["g"], args["dim"]
    _need(v.dim() > 0 and dim in (0, v.dim() - 1), f"dim is {dim}")
    expected = [extent if axis == dim else 1 for axis, extent in enumerate(v.shape)]
    _need(list(g.shape) == expected, f"g is {list(g.shape)}, needed {expected}")


# ---- recurrent layers -------------------------------------------------------------------------


@_with_options
def _recurrent(args: Arguments, gates: int, states: int) -> None:
    """Check the extents of every parameter of every layer and direction, and of the states."""
    value, params = args["input"], args["params"]
    hidden_states = args["hx"] if states == 2 else [args["hx"]]
    _need(args["train"] is False, "it trains")
    directions = 2 if args["bidirectional"] else 1
    each = 4 if args["has_biases"] else 2
    layers = args["num_layers"]
    _need(value.dim() == 3 and value.numel() > 0, "input has not three extents, or is empty")
    _need(layers >= 1 and len(params) == layers * directions * each, "parameters are missing")
    _need(len(hidden_states) == states, f"{len(hidden_states)} states")
    batch, width = value.shape[0 if args["batch_first"] else 1], value.shape[2]
    hidden = params[1].shape[-1] if params[1].dim() else 0
    _need(hidden > 0, "a state of no extent")
    for state in hidden_states:
        expected = [layers * directions, batch, hidden]
        _need(list(state.shape) == expected, f"a state is {list(state.shape)}, needed {expected}")
    for place, tensor in enumerate(params):
        layer, role = place // (directions * each), place % each
        inner = width if layer == 0 else hidden * directions
        expected = [gates * hidden, *([inner], [hidden], [], [])[role]]
        _need(
            list(tensor.shape) == expected,
            f"parameter {place} is {list(tensor.shape)}, needed {expected}",
        )
    everything = [value, *hidden_states, *params]
    _need(value.is_floating_point(), f"input is {value.dtype}")
    _need(len({tensor.dtype for tensor in everything}) == 1, "dtypes differ")


@_with_options
def _cell(args: Arguments, gates: int, states: int) -> None:
    value = args["input"]
    hidden_states = args["hx"] if states == 2 else [args["hx"]]
    _need(value.dim() == 2 and value.numel() > 0, "input has not two extents, or is empty")
    _need(len(hidden_states) == states, f"{len(hidden_states)} states")
    hidden = hidden_states[0].shape[-1] if hidden_states[0].dim() else 0
    _need(hidden > 0, "a state of no extent")
    expected = {
        "w_ih": [gates * hidden, value.shape[1]],
        "w_hh": [gates * hidden, hidden],
        "b_ih": [gates * hidden],
        "b_hh": [gates * hidden],
    }
    parameters = _tensors(args, expected)
    for name, tensor in parameters.items():
        _need(list(tensor.shape) == expected[name], f"{name} is {list(tensor.shape)}")
    for state in hidden_states:
        _need(list(state.shape) == [value.shape[0], hidden], f"state {list(state.shape)}")
    everything = [value, *hidden_states, *parameters.values()]
    _need(value.is_floating_point(), f"input is {value.dtype}")
    _need(len({tensor.dtype for tensor in everything}) == 1, "dtypes differ")
    _need(("b_ih" in parameters) == ("b_hh" in parameters), "one bias of two")


# ---- convolutions, pools, pictures ------------------------------------------------------------

_WINDOW: Final = _all_of(
    _numbers(1, MAX_GEOMETRY, "kernel_size", "stride", "dilation", "divisor_override"),
    _numbers(0, MAX_GEOMETRY, "padding", "output_padding"),
)


def _convolution(args: Arguments) -> None:
    value, weight, groups = args["input"], args["weight"], args["groups"]
    transposed = args.get("transposed", "output_padding" in args)
    stride, dilation = args["stride"], args["dilation"]
    _need(weight.dim() in (3, 4, 5), f"weight has {weight.dim()} dimensions")
    _need(value.dim() in (weight.dim() - 1, weight.dim()), "input and weight have other dimensions")
    _need(weight.numel() > 0, "weight is empty")
    channels = value.shape[value.dim() - weight.dim() + 1]
    _need(1 <= groups <= channels, f"{channels} channels in {groups} groups")
    outer, inner = weight.shape[:2]
    _need(channels == (outer if transposed else inner * groups), "channels are not the weight's")
    _need(outer % groups == 0, f"{outer} filters in {groups} groups")
    channels_out = inner * groups if transposed else outer
    bias = args["bias"]
    _need(bias is None or list(bias.shape) == [channels_out], f"bias is not [{channels_out}]")
    if transposed:
        rank = weight.dim() - 2
        extra = _each(args["output_padding"], rank)
        for e, m, d in zip(extra, _each(stride, rank), _each(dilation, rank), strict=True):
            _need(e < max(m, d), f"output_padding is {extra}")


def _each(numbers: Any, rank: int) -> list[int]:
    """Return one number for each dimension, from a list or from one number for all dimensions."""
    numbers_of_axes = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
    numbers_of_axes = numbers_of_axes * rank if len(numbers_of_axes) == 1 else numbers_of_axes
    _need(len(numbers_of_axes) == rank, f"{len(numbers_of_axes)} numbers for {rank} dimensions")
    return numbers_of_axes


_CONVOLUTION: Final = _all_of(
    _numbers(1, MAX_GEOMETRY, "stride", "dilation"),
    lambda args: (
        _need(args["padding"] in ("same", "valid"), "padding")
        if isinstance(args["padding"], str)
        else _WINDOW(args)
    ),
    _numbers(0, MAX_GEOMETRY, "output_padding"),
    _floats("input", "weight", "bias"),
    _convolution,
)


def _pool(axes: int) -> Contract:
    return _all_of(_dims("self", axes + 1, axes + 2), _not_empty("self"), _WINDOW)


def _adaptive(axes: int) -> Contract:
    return _all_of(
        _dims("self", axes + 1, axes + 2),
        _not_empty("self"),
        _numbers(1, MAX_GEOMETRY, "output_size"),
    )


def _unpool(args: Arguments) -> None:
    _need(args["self"].shape == args["indices"].shape, "indices are not the input's extents")
    _need(args["indices"].dtype is torch.int64, "indices are not int64")


def _scales(args: Arguments) -> None:
    for name in ("scales", "scales_d", "scales_h", "scales_w", "scale_factors"):
        value = args.get(name)
        for scale in value if isinstance(value, list | tuple) else [value]:
            is_sound = scale is None or MIN_SCALE <= scale <= MAX_SCALE  # False for NaN
            _need(is_sound, f"{name} is {value}")


@_with_options
def _scaled(args: Arguments, axes: int) -> None:
    value = args.get("self", args.get("input"))
    _need(value.dim() == axes + 2 and value.numel() > 0, "input has other extents, or none")
    factors = args.get("scale_factors")
    _need(factors is None or args["output_size"] is None, "a size and factors")
    _need(factors is None or len(factors) == axes, "factors for other axes")
    names = ["scales"] if axes == 1 else ["scales_d", "scales_h", "scales_w"][3 - axes :]
    for axis, name in enumerate(names):
        scale, extent = args.get(name), value.shape[2 + axis]
        # Kernels compute the positions to read from the scale, and their number from the size.
        is_one = scale is None or int(extent * scale) == args["output_size"][axis]
        _need(is_one, f"{name} is {scale}, which is not the size's")


def _upsample(axes: int) -> Contract:
    return _all_of(_numbers(1, MAX_GEOMETRY, "output_size"), _scales, _scaled(axes))


def _sampler(axes: int, modes: tuple[int, ...]) -> Contract:
    letters = ["D", "H", "W"][3 - axes :]
    return _all_of(
        _extents(
            input=" ".join(["N", "C", *letters]),
            grid=" ".join(["N", *(letter.lower() for letter in letters), str(axes)]),
        ),
        _floats("input", "grid"),
        _not_empty("input"),
        _is("interpolation_mode", *modes),
        _is("padding_mode", 0, 1, 2),
    )


def _any_sampler(args: Arguments) -> None:
    (_sampler(3, (0, 1)) if args["input"].dim() == 5 else _sampler(2, (0, 1, 2)))(args)


def _affine(args: Arguments) -> None:
    size, theta = list(args["size"]), args["theta"]
    _need(len(size) in (4, 5), f"size is {size}")
    axes = len(size) - 2
    expected = [size[0], axes, axes + 1]
    _need(list(theta.shape) == expected, f"theta is {list(theta.shape)}, needed {expected}")


def _closed_circle(args: Arguments) -> None:
    """Refuse negative circular padding: it removes rows that the other side's padding copies."""
    _need(args["mode"] != "circular" or min(args["pad"], default=0) >= 0, f"pad {args['pad']}")


# ---- looking up -------------------------------------------------------------------------------


@_with_options
def _along(args: Arguments, *others: str) -> None:
    """Require, for gather and scatter, an index no larger than ``self`` except along ``dim``.
    It must also be no larger than each of ``others``, whose dtype must be that of ``self``."""
    value, index = args["self"], args["index"]
    axis = args["dim"] + (value.dim() if args["dim"] < 0 else 0)
    _need(index.dim() == value.dim() and 0 <= axis < max(value.dim(), 1), "dimensions differ")
    for place, extent in enumerate(index.shape):
        _need(place == axis or extent <= value.shape[place], "index exceeds its tensor")
    for other in _tensors(args, others).values():
        _need(other.dim() == index.dim(), "dimensions differ")
        fits = all(a <= b for a, b in zip(index.shape, other.shape, strict=True))
        _need(fits, "index exceeds its source")
        _need(other.dtype == value.dtype, "dtypes differ")


def _rows(args: Arguments) -> None:
    """Require, for index_select and similar operators, 1-D indices and one source row for each."""
    value, index = args["self"], args["index"]
    _need(index.dim() <= 1, "index has more than one dimension")
    axis = args["dim"] + (value.dim() if args["dim"] < 0 else 0)
    _need(0 <= axis < max(value.dim(), 1), f"dim is {args['dim']}")
    source = args.get("source")
    if source is not None:
        expected = list(value.shape)
        if expected:
            expected[axis] = index.numel()
        _need(list(source.shape) == expected, f"source is {list(source.shape)}, needed {expected}")
        _need(source.dtype == value.dtype, "dtypes differ")


def _places(args: Arguments) -> None:
    indices = [index for index in args["indices"] if index is not None]
    _need(0 < len(args["indices"]) <= args["self"].dim(), "too many indices, or none")
    for index in indices:
        _need(index.dtype in INDICES or index.dtype is torch.bool, f"an index is {index.dtype}")


# ---- attention --------------------------------------------------------------------------------


def _attention(args: Arguments) -> None:
    query, key, value = (args[name] for name in ("query", "key", "value"))
    mask, is_shared = args["attn_mask"], args["enable_gqa"]
    _need(query.dim() == key.dim() == value.dim() and query.dim() >= 2, "dimensions differ")
    _need(query.shape[-1] == key.shape[-1] > 0, "query and key have other widths")
    _need(key.shape[-2] == value.shape[-2], "keys and values differ in number")
    _need(key.shape[:-2] == value.shape[:-2], "keys and values differ in extents")
    leading, theirs = list(query.shape[:-2]), list(key.shape[:-2])
    if is_shared and query.dim() == 4:
        heads, shared = leading.pop(), theirs.pop()
        _need(shared > 0 and heads % shared == 0, f"{heads} heads share {shared}")
    _need(leading == theirs, "query and key differ in extents")
    if mask is not None:
        expected = [*query.shape[:-2], query.shape[-2], key.shape[-2]]
        _need(2 <= mask.dim() <= query.dim(), "the mask has other dimensions")
        pairs = zip(reversed(mask.shape), reversed(expected), strict=False)
        _need(all(m in (1, w) for m, w in pairs), f"the mask is {list(mask.shape)}")
        _need(mask.dtype in (torch.bool, query.dtype), f"the mask is {mask.dtype}")


# ---- the list ---------------------------------------------------------------------------------

_MEAN_OF_BATCH: Final = _all_of(_PER_CHANNEL, _CHANNEL_FLOATS, _not_empty("input"))
_LAYER_NORM: Final = _all_of(_floats("input", "weight", "bias", mixed=True), _trailing)
_GROUP_NORM: Final = _all_of(
    _extents(input="N C *", weight="C", bias="C"),
    _floats("input", "weight", "bias", mixed=True),
    _not_empty("input"),
)
_SCATTER: Final = _all_of(_indices("index"), _along("src"))
_INDEX_ROWS: Final = _all_of(_indices("index"), _rows)
_NO_CHANCE: Final = _is("train", False)

_FAMILIES: Final[Mapping[str, Contract]] = {
    "batch_norm": _all_of(
        _MEAN_OF_BATCH,
        # Without running statistics, training uses the batch's statistics and writes nothing.
        lambda g: _need(
            (g["running_mean"] is None and g["running_var"] is None)
            if g["training"] is True
            else None not in (g["running_mean"], g["running_var"]),
            "it would write its running statistics" if g["training"] else "no running statistics",
        ),
    ),
    "instance_norm": _all_of(
        _MEAN_OF_BATCH,
        lambda g: _need(
            not g["use_input_stats"] or (g["running_mean"] is None and g["running_var"] is None),
            "it would write its running statistics",
        ),
    ),
    "layer_norm rms_norm native_layer_norm": _LAYER_NORM,
    "group_norm": _all_of(_GROUP_NORM, _grouped("num_groups")),
    "native_group_norm": _all_of(_GROUP_NORM, _grouped("group"), _flattened),
    "_weight_norm": _all_of(_floats("v", "g"), _weight_norm, _not_empty("v")),
    "prelu": _all_of(
        _floats("self", "weight"),
        lambda g: _need(
            g["weight"].dim() <= 1
            and g["weight"].numel() in (1, *(g["self"].shape[1:2] if g["self"].dim() > 1 else ())),
            f"weight is {list(g['weight'].shape)}",
        ),
    ),
    "lstm": _recurrent(4, 2),
    "gru": _recurrent(3, 1),
    "rnn_tanh rnn_relu": _recurrent(1, 1),
    "lstm_cell": _cell(4, 2),
    "gru_cell": _cell(3, 1),
    "linear": _all_of(
        _extents(weight="O I", bias="O"),
        lambda g: _need(g["input"].dtype == g["weight"].dtype, "dtypes differ"),
        lambda g: _need(
            g["input"].dim() > 0 and g["input"].shape[-1] == g["weight"].shape[1],
            "input is not as wide as the weight",
        ),
    ),
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution": (
        _CONVOLUTION
    ),
    "avg_pool1d max_pool1d": _pool(1),
    "avg_pool2d max_pool2d max_pool2d_with_indices": _pool(2),
    "avg_pool3d max_pool3d max_pool3d_with_indices": _pool(3),
    "adaptive_avg_pool1d adaptive_max_pool1d": _adaptive(1),
    "adaptive_avg_pool2d adaptive_max_pool2d _adaptive_avg_pool2d": _adaptive(2),
    "adaptive_avg_pool3d adaptive_max_pool3d _adaptive_avg_pool3d": _adaptive(3),
    "max_unpool2d": _all_of(
        _dims("self", 3, 4), _not_empty("self"), _numbers(1, MAX_GEOMETRY, "output_size"), _unpool
    ),
    "upsample_linear1d upsample_nearest1d _upsample_nearest_exact1d": _upsample(1),
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa _upsample_nearest_exact2d": _upsample(2),
    "upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d": _upsample(3),
    "grid_sampler": _any_sampler,
    "grid_sampler_2d": _sampler(2, (0, 1, 2)),
    "grid_sampler_3d": _sampler(3, (0, 1)),
    "affine_grid_generator": _all_of(_numbers(1, MAX_GEOMETRY, "size"), _affine),
    "im2col": _all_of(_dims("self", 3, 4), _not_empty("self"), _WINDOW),
    "col2im": _all_of(
        _dims("self", 2, 3), _not_empty("self"), _WINDOW, _numbers(1, MAX_GEOMETRY, "output_size")
    ),
    "pixel_shuffle pixel_unshuffle channel_shuffle": _all_of(
        _numbers(1, MAX_GEOMETRY, "upscale_factor", "downscale_factor", "groups"),
        lambda g: _need(g["self"].dim() >= 3, "too few dimensions"),
    ),
    "constant_pad_nd": _numbers(-MAX_GEOMETRY, MAX_GEOMETRY, "pad"),
    "pad": _all_of(_numbers(-MAX_GEOMETRY, MAX_GEOMETRY, "pad"), _closed_circle),
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d": _all_of(
        _numbers(-MAX_GEOMETRY, MAX_GEOMETRY, "padding"), _not_empty("self")
    ),
    "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_irfft fft_irfft2 fft_rfft "
    "fft_rfft2": _all_of(_numbers(1, 1 << 24, "n", "s"), _not_empty("self")),
    "embedding": _all_of(_extents(weight="V D"), _indices("indices"), _is("sparse", False)),
    "gather": _all_of(_indices("index"), _along(), _is("sparse_grad", False)),
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce": _SCATTER,
    "index_select index_add index_add_ index_copy index_copy_ index_fill index_fill_": _INDEX_ROWS,
    "index index_put index_put_": _places,
    "take_along_dim": _all_of(
        _indices("indices"),
        lambda g: _need(g["dim"] is None or g["indices"].dim() == g["self"].dim(), "dimensions"),
    ),
    "one_hot": _all_of(
        _numbers(1, 1 << 24, "num_classes"),
        lambda g: _need(g["self"].dtype is torch.int64, "it takes int64"),
    ),
    "bucketize": _extents(boundaries="N"),
    "scaled_dot_product_attention": _all_of(
        _floats("query", "key", "value"),
        _attention,
        lambda g: _need(g["dropout_p"] == 0, "dropout_p"),
    ),
    "dropout dropout_": _NO_CHANCE,
    "median": _not_repeated,
    "div divide div_": _division,
    "view": lambda g: _need(g.get("dtype") is not torch.bool, "bytes as bool"),
}

CONTRACTS: Final[Mapping[str, Contract]] = {
    name: contract for names, contract in _FAMILIES.items() for name in names.split()
}


_LIKE_FIRST: Final = frozenset(
    {
        "relu",
        "relu6",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "elu",
        "mish",
        "softplus",
        "exp",
        "sqrt",
        "rsqrt",
        "neg",
        "abs",
        "roll",
        "dropout",
        "softmax",
        "batch_norm",
        "layer_norm",
        "group_norm",
        "instance_norm",
        "rms_norm",
    }
)
_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_ELEMENTWISE: Final = frozenset({"add", "sub", "mul", "div"})


def recurrent_results(
    value: torch.Tensor, hx: Any, is_bidirectional: bool, is_batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """Return LSTM, GRU or RNN results without data; torch would compute them step by step."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    first, second = value.shape[:2]
    width = states[0].shape[-1] * (2 if is_bidirectional else 1)
    if is_batch_first:
        output = value.new_empty([second, first, width]).transpose(0, 1)
    else:
        output = value.new_empty([first, second, width])
    return (output, *(torch.empty_like(state) for state in states))


def _known_result(name: str, args: tuple[Any, ...]) -> Any:
    """Return a frequent operator's result on meta, if the contract determines it, else None.

    Torch's own meta functions of these operators are in Python and take 1 ms each, which is too
    long because a program is checked at each of its batch sizes.
    """
    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or not first.is_floating_point():
        return None
    if name in _LIKE_FIRST and not any(isinstance(a, torch.dtype) for a in args):
        return torch.empty_like(first)
    if name in _ELEMENTWISE and len(args) == 2 and isinstance(args[1], torch.Tensor):
        other = args[1]
        is_same = (first.shape, first.stride()) == (other.shape, other.stride())
        return torch.empty_like(first) if is_same and first.dtype == other.dtype else None
    if name in _RECURRENT and len(args) == 9:
        return recurrent_results(first, args[1], args[7], args[8])
    if name == "linear" and all(a is None or a.dtype == first.dtype for a in args[1:]):
        return first.new_empty([*first.shape[:-1], args[1].shape[0]])
    if name == "scaled_dot_product_attention" and len(args) >= 3:
        shape = torch.Size([*first.shape[:-1], args[2].shape[-1]])
        if shape == first.shape and first.dim() == 4 and first.stride(-1) == 1:
            return torch.empty_like(first)  # the fused kernel keeps the memory layout
        return first.new_empty(shape)
    return None


_ONLY_FIRST: Final = frozenset({"native_layer_norm", "native_group_norm"})
"""Operators whose further results, for a backward pass, have other extents than on meta."""


def contracted(call: Any) -> Callable[..., Any]:
    """Return ``call`` with its contract, if it has one, checked first.

    The returned function raises BrokenContract if the kernel is unsafe with its arguments. Kernels
    without a contract check their arguments themselves.
    """
    check = _check(call)

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return call(*args, **kwargs)

    return checked


def guarded(call: Any) -> Callable[..., Any]:
    """Return ``call`` for tensors on meta, with its contract checked first, as ``contracted``."""
    name, check = _name(call), _check(call)

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        known = None if kwargs else _known_result(name, args)
        if known is not None:
            return known
        outputs = call(*args, **kwargs)
        return outputs[:1] if name in _ONLY_FIRST else outputs

    return checked


def _name(call: Any) -> str:
    name: str = call._schema.name
    return name.removeprefix("aten::")


def _check(call: Any) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    contract, entries = CONTRACTS.get(_name(call)), call._schema.arguments
    names = [entry.name for entry in entries]
    defaults = {entry.name: entry.default_value for entry in entries if entry.has_default_value()}

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if contract is not None:
            contract({**defaults, **dict(zip(names, args, strict=False)), **kwargs})

    return check
