"""The closed list of operators a program may call. Pure, no torch.

A bundle comes from a client: it names operators, and only names on this list are ever looked up.
A name stands with its overloads (``default`` where none is said), so that nothing is reached by a
suffix: not an ``out=`` form, not TorchScript's own arithmetic on lists and texts, not an attribute.

What is left out, and why:

- anything that reads or writes outside its arguments: ``from_file``, ``_print``, ``set_``;
- anything that reaches past a tensor's own extent: a weight is a view of the *whole* arena, so
  ``as_strided`` or ``_reshape_alias`` would read another model's memory, and the unchecked
  ``_unsafe_*`` index operators with them;
- windows that overlap (``unfold``): kernels take a stride for granted, and left out most of an
  answer; its copy is on the list, so no elements share memory but those that ``expand`` repeats;
- uninitialised memory (``empty``, ``new_empty``): it holds what the last tenant left;
- random numbers: a request must be answerable again, with the same bits;
- ``embedding_bag``: its kernel believes the offsets, which are data (the fence fuzzing read freed
  memory and past tensors through them);
- shapes that depend on data (``nonzero``, ``item``): a region and a reply could not be sized;
- bytes read as a bool (``view.dtype``), which could be neither 0 nor 1: by its contract;
- what no model we know needs: decompositions of matrices, packed sequences, windows, quantiles.

Two groups differ in what makes their kernels safe. The operators *checked by meta* compute through
TensorIterator, a structured kernel or a view: what they accept without data is what their kernels
need. The others index with one argument by the extents of another, or take an enumeration they
believe, and each has its contract in ``contracts``; ``make fuzz`` calls all of them between
unmapped pages.

The split into fresh and may-alias serves another question (``graph.check_no_mutation``): can this
in-place call reach a weight or a request's input?
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
"""What they accept without data is all their kernels need."""

BY_CONTRACT: Final = frozenset(
    _table(_FRESH_BY_CONTRACT + _IN_PLACE_BY_CONTRACT + _MAY_ALIAS_BY_CONTRACT)
)
"""Each has a contract of its own."""

ZEROED: Final = BY_CONTRACT - frozenset(_table(_WRITTEN_WHOLE))
"""Their results begin as zeros. Kernels that go by TensorIterator, or are in every second model,
have one loop over all of a result; what the others leave out shall not be another's memory."""

FRESH: Final = frozenset(_table(_POINTWISE + _FRESH + _FRESH_BY_CONTRACT))
"""Results are new memory (or plain integers): changing them in place changes no argument."""

OVERLOADS: Final[Mapping[str, frozenset[str]]] = _table(
    _POINTWISE
    + _IN_PLACE
    + _IN_PLACE_BY_CONTRACT
    + _FRESH
    + _FRESH_BY_CONTRACT
    + _MAY_ALIAS
    + _MAY_ALIAS_BY_CONTRACT
)
"""The whole list: a name, and those of its overloads that a program may call."""

ALLOWED: Final = frozenset(OVERLOADS)

# Checks that export leaves behind; they compute nothing, and the manifest's signature replaces
# them. Dropped at export, and not accepted in a bundle.
DROPPED_AT_EXPORT: Final = frozenset(
    {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
)

CONTRACTS_VERSION: Final = 8  # one more whenever a contract or this list asks for more

_ATEN: Final = re.compile(r"aten\.(\w{1,64})\.(\w{1,64})", re.ASCII)


@functools.cache
def checked_by() -> str:
    """Return the checks' version: programs checked by another are checked again before a run.

    Kernels, and the arguments that they accept without data, depend on torch, so its version is
    included.
    """
    return f"contracts {CONTRACTS_VERSION}, torch {version('torch')}"


def split_target(target: str) -> tuple[str, str, str]:
    """``"aten.add.Tensor"`` as ``("aten", "add", "Tensor")``, if a program may call it.

    Raises:
        RegistrationRefused: the name is not on the closed list.
    """
    if target == "_operator.getitem":
        return ("_operator", "getitem", "")
    if target.startswith("_operator.") and target[10:] in INTEGER_OPERATORS:
        return ("_operator", target[10:], "")
    if target in TARGETS:  # of a derived graph; ``bundle.check_graph`` refuses any other's
        return (NAMESPACE, target.partition(".")[2], "")
    match = _ATEN.fullmatch(target)
    if match is None or match[2] not in OVERLOADS.get(match[1], ()):
        raise RegistrationRefused(
            f"operator {target[:120]!r}", "it is not on the list of allowed operators"
        )
    return ("aten", match[1], match[2])
