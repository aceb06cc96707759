"""The closed list of operators that a program may call. Pure, no torch.

A client's bundle contains names of operators, and only names on this list are looked up. Each name
is listed with its allowed overloads (``default`` if none is given). So no other form can be called,
such as an ``out=`` overload, TorchScript's arithmetic on lists and texts, or an attribute.

The list does not contain:

- operators that read or write outside their arguments: ``from_file``, ``_print``, ``set_``;
- operators that reach past a tensor's extents: a weight is a view of the *whole* arena, so
  ``as_strided``, ``_reshape_alias`` and the unchecked ``_unsafe_*`` index operators could read
  another model's memory;
- overlapping windows (``unfold``): some kernels assume usual strides, and omitted most of an
  answer. Its copy (``unfold_copy``) is allowed, so elements share memory only after ``expand``;
- uninitialised memory (``empty``, ``new_empty``), which may contain another tenant's bytes;
- random numbers: a repeated request must get the same bits;
- ``embedding_bag``: its kernel does not check the offsets, which are data (fuzzing read freed
  memory and past tensors with them);
- shapes that depend on data (``nonzero``, ``item``): the sizes of buffers would be unknown;
- bytes viewed as bool (``view.dtype``), which may be neither 0 nor 1; a contract refuses them;
- operators that no known model needs: matrix decompositions, packed sequences, quantiles.

Two groups of operators differ in the reason why their kernels are safe. Operators *checked by meta*
use TensorIterator, a structured kernel or a view: their kernels are safe with all arguments that
torch accepts on meta. The other operators index one argument by the extents of another, or use an
enumeration without a check. Each of them has a contract in ``contracts``, and ``make fuzz`` calls
all of them with memory between unmapped pages.

Operators are also divided into those with fresh results and those whose results may alias an
argument. ``graph.check_no_mutation`` uses this to detect writes to a weight or a request's input.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

from ...base.errors import RegistrationRefused
from ..interface.packing import NAMESPACE, TARGETS

_POINTWISE: Final = """
__and__:Scalar,Tensor __or__:Tensor,Scalar __xor__:Tensor,Scalar abs acos acosh add:Tensor,Scalar
addcdiv addcmul asin asinh atan atan2 atanh bitwise_and:Tensor,Scalar,Scalar_Tensor
bitwise_left_shift:Tensor,Tensor_Scalar,Scalar_Tensor bitwise_not
bitwise_or:Tensor,Scalar,Scalar_Tensor bitwise_right_shift:Tensor,Tensor_Scalar,Scalar_Tensor
bitwise_xor:Tensor,Scalar,Scalar_Tensor ceil celu clamp:default,Tensor clamp_max:default,Tensor
clamp_min:default,Tensor clip:default,Tensor cos cosh deg2rad elu
eq:Tensor,Scalar erf erfc exp exp2 expm1 floor floor_divide:default,Scalar fmax fmin
fmod:Tensor,Scalar frac ge:Tensor,Scalar gelu glu greater:Tensor,Scalar
greater_equal:Tensor,Scalar gt:Tensor,Scalar hardshrink hardsigmoid hardswish hardtanh isfinite
isinf isnan le:Tensor,Scalar leaky_relu lerp:Scalar,Tensor less:Tensor,Scalar
less_equal:Tensor,Scalar log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not
logical_or logical_xor logit lt:Tensor,Scalar masked_fill:Scalar,Tensor maximum minimum mish
mul:Tensor,Scalar multiply:Tensor,Scalar nan_to_num ne:Tensor,Scalar neg not_equal:Tensor,Scalar
pow:Tensor_Tensor,Tensor_Scalar,Scalar rad2deg reciprocal relu relu6
remainder:Tensor,Scalar,Scalar_Tensor round:default,decimals rsqrt rsub:Tensor,Scalar selu
sigmoid sign silu sin sinh softplus softshrink sqrt square sub:Tensor,Scalar
subtract:Tensor,Scalar tan tanh threshold true_divide:Tensor,Scalar trunc
where:self,ScalarOther,ScalarSelf,Scalar xlogy:Tensor,Scalar_Other,Scalar_Self
"""

_IN_PLACE: Final = """
abs_ add_:Tensor,Scalar addcdiv_ addcmul_ ceil_ celu_ clamp_:default,Tensor
clamp_max_:default,Tensor clamp_min_:default,Tensor clip_:default,Tensor copy_ cos_ elu_
exp_ fill_:Scalar,Tensor floor_
floor_divide_:Tensor,Scalar gelu_ hardsigmoid_ hardswish_ hardtanh_ leaky_relu_ lerp_:Scalar,Tensor
log_ masked_fill_:Scalar,Tensor mish_ mul_:Tensor,Scalar nan_to_num_ neg_ pow_:Scalar,Tensor
reciprocal_ relu6_ relu_ remainder_:Tensor,Scalar round_:default,decimals rsqrt_ selu_ sigmoid_
sign_ silu_ sin_ sqrt_ square_ sub_:Tensor,Scalar tanh_ threshold_ tril_ triu_ zero_
"""

_IN_PLACE_BY_CONTRACT: Final = """
div_:Tensor,Tensor_mode,Scalar,Scalar_mode dropout_ index_add_ index_copy_
index_fill_:int_Tensor,int_Scalar index_put_ scatter_:src,value,reduce,value_reduce scatter_add_
"""

_FRESH: Final = """
_log_softmax _softmax _to_copy addmm addmv all:default,dim,dims amax amin any:default,dim,dims
arange:default,start,start_step argmax argmin argsort:default,stable baddbmm bmm cat clone concat
cosine_similarity cumprod cumsum diag_embed diff dot eye:default,m fill:Scalar,Tensor flip full
full_like lift_fresh_copy linalg_vector_norm linspace log_softmax:int logsumexp matmul
max:other,default,dim mean:default,dim min:other,default,dim mm mv new_full
new_ones new_zeros norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype ones ones_like outer
prod:default,dim_int repeat repeat_interleave:self_int roll scalar_tensor select_scatter
slice_scatter softmax:int sort:default,stable stack std:default,dim,correction
std_mean:default,dim,correction sum:dim_IntList,default topk tril triu unfold_copy
var:default,dim,correction var_mean:default,dim,correction vdot zeros zeros_like sym_numel
sym_size:int
"""

_FRESH_BY_CONTRACT: Final = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa:default,vec
_upsample_bilinear2d_aa:default,vec _upsample_nearest_exact1d:default,vec
_upsample_nearest_exact2d:default,vec _upsample_nearest_exact3d:default,vec _weight_norm
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d batch_norm
bucketize:Tensor channel_shuffle col2im constant_pad_nd conv1d:default,padding
conv2d:default,padding conv3d:default,padding conv_transpose1d conv_transpose2d:input
conv_transpose3d:input convolution div:Tensor,Scalar,Tensor_mode,Scalar_mode
divide:Tensor,Scalar,Tensor_mode,Scalar_mode embedding fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2
fft_ifftn fft_irfft fft_irfft2 fft_rfft fft_rfft2 gather grid_sampler grid_sampler_2d
grid_sampler_3d group_norm gru:input gru_cell im2col index_add index_copy
index_fill:int_Tensor,int_Scalar index_put index_select instance_norm layer_norm linear lstm:input
lstm_cell max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
max_unpool2d median:default,dim native_group_norm native_layer_norm one_hot pixel_shuffle
pixel_unshuffle prelu reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
replication_pad2d replication_pad3d rms_norm rnn_relu:input rnn_tanh:input
scaled_dot_product_attention scatter:value,src,reduce,value_reduce scatter_add scatter_reduce:two
take_along_dim upsample_bicubic2d:default,vec upsample_bilinear2d:default,vec
upsample_linear1d:default,vec upsample_nearest1d:default,vec upsample_nearest2d:default,vec
upsample_nearest3d:default,vec upsample_trilinear3d:default,vec
"""

_WRITTEN_WHOLE: Final = """
_adaptive_avg_pool2d adaptive_avg_pool2d avg_pool2d batch_norm constant_pad_nd conv1d conv2d conv3d
convolution div div_ divide dropout embedding gather group_norm index index_select layer_norm linear
max_pool2d native_group_norm native_layer_norm prelu rms_norm scaled_dot_product_attention view
"""

_MAY_ALIAS: Final = """
_unsafe_view alias atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk contiguous
detach diagonal einsum expand expand_as flatten:using_ints imag lift_fresh mT
meshgrid:default,indexing movedim:int,intlist narrow numpy_T permute real reshape reshape_as
select:int slice:Tensor split:Tensor,sizes split_with_sizes squeeze:default,dim,dims swapaxes
swapdims t tensor_split:sections,indices tensordot to:device,dtype,other,dtype_layout transpose:int
type_as unbind:int unflatten:int unsqueeze view_as view_as_complex view_as_real
"""

_MAY_ALIAS_BY_CONTRACT: Final = "dropout index:Tensor pad view:default,dtype"


def _table(text: str) -> dict[str, frozenset[str]]:
    entries = [entry.partition(":") for entry in text.split()]
    return {name: frozenset((suffixes or "default").split(",")) for name, _, suffixes in entries}


INTEGER_OPERATORS: Final = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg", "min", "max"})
"""Arithmetic on extents (``_operator.mul`` and so on): integers in, an integer out."""

CHECKED_BY_META: Final = frozenset(_table(_POINTWISE + _IN_PLACE + _FRESH + _MAY_ALIAS))
"""Operators whose kernels are safe with all arguments that torch accepts on meta."""

BY_CONTRACT: Final = frozenset(
    _table(_FRESH_BY_CONTRACT + _IN_PLACE_BY_CONTRACT + _MAY_ALIAS_BY_CONTRACT)
)
"""Operators that have a contract."""

ZEROED: Final = BY_CONTRACT - frozenset(_table(_WRITTEN_WHOLE))
"""Operators whose results are zeroed first, because their kernels might not write all elements, and
the rest must not contain another request's bytes. Kernels of the other operators use
TensorIterator or are very common, and write whole results."""

FRESH: Final = frozenset(_table(_POINTWISE + _FRESH + _FRESH_BY_CONTRACT))
"""Operators whose results are new memory or integers: writes to them change no argument."""

OVERLOADS: Final[Mapping[str, frozenset[str]]] = _table(
    _POINTWISE
    + _IN_PLACE
    + _IN_PLACE_BY_CONTRACT
    + _FRESH
    + _FRESH_BY_CONTRACT
    + _MAY_ALIAS
    + _MAY_ALIAS_BY_CONTRACT
)
"""The whole list: name -> overloads that a program may call."""

# Checks in exported graphs. They compute nothing, and the manifest's signature replaces them, so
# the export drops them; a bundle that contains one is refused.
DROPPED_AT_EXPORT: Final = frozenset(
    {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
)

CONTRACTS_VERSION: Final = 8  # increment it if a contract or this list becomes stricter

_ATEN: Final = re.compile(r"aten\.(\w{1,64})\.(\w{1,64})", re.ASCII)


@functools.cache
def checked_by() -> str:
    """Return the version of the checks; programs of other versions are checked again before a run.

    It includes torch's version, on which kernels and their checks on meta depend.
    """
    return f"contracts {CONTRACTS_VERSION}, torch {version('torch')}"


def split_target(target: str) -> tuple[str, str, str]:
    """Return the parts of a target: ``("aten", "add", "Tensor")`` for ``"aten.add.Tensor"``.

    Raises:
        RegistrationRefused: the name is not on the closed list.
    """
    if target == "_operator.getitem":
        return ("_operator", "getitem", "")
    if target.startswith("_operator.") and target[10:] in INTEGER_OPERATORS:
        return ("_operator", target[10:], "")
    if target in TARGETS:  # ``bundle.decode_graph`` accepts these only in derived graphs
        return (NAMESPACE, target.partition(".")[2], "")
    match = _ATEN.fullmatch(target)
    if match is None or match[2] not in OVERLOADS.get(match[1], ()):
        raise RegistrationRefused(
            f"operator {target[:120]!r}", "it is not on the list of allowed operators"
        )
    return ("aten", match[1], match[2])
