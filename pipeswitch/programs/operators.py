"""The closed list of operators a program may call. Pure, no torch.

A bundle comes from a client: it names operators, and only names on this list are ever looked up.
What is left out, and why:

- anything that reads or writes outside its arguments: ``from_file``, ``_print``, ``set_``;
- anything that reaches past a tensor's own extent: a weight is a view of the *whole* arena, so
  ``as_strided`` or ``_reshape_alias`` would read another model's memory, and the unchecked
  ``_unsafe_*`` index operators with them;
- uninitialised memory (``empty``, ``new_empty``): it holds what the last tenant left;
- random numbers: a request must be answerable again, with the same bits;
- shapes that depend on data (``nonzero``, ``item``): a region and a reply could not be sized.

The split into fresh and may-alias serves one question (``graph.check_no_mutation``): can this
in-place call reach a weight or a request's input?
"""

from __future__ import annotations

import re
from typing import Final

from ..errors import RegistrationRefused

_POINTWISE: Final = """
abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
copysign cos cosh deg2rad div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin
fmod frac ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf
isnan le leaky_relu lerp lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or
logical_xor logit lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg pow prelu
rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh
softplus softshrink sqrt square sub tan tanh threshold true_divide trunc where xlogy subtract
divide greater greater_equal less less_equal not_equal glu log_sigmoid __and__ __or__ __xor__
"""

_FRESH: Final = """
addbmm addmm addmv addr all amax amin aminmax any arange argmax argmin argsort baddbmm bmm cat
clone concat conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
convolution_overrideable count_nonzero cross cummax cummin cumprod cumsum diag_embed dot embedding
eye fill flip full full_like gather grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru
index_add index_copy index_fill index_put index_select instance_norm layer_norm linalg_vector_norm
linear linspace log_softmax logsumexp lstm masked_scatter matmul max max_pool1d max_pool2d
max_pool2d_with_indices max_pool3d max_pool3d_with_indices mean median min mm mv native_group_norm
native_layer_norm new_full new_ones new_zeros norm one_hot ones ones_like outer pixel_shuffle
pixel_unshuffle prod repeat repeat_interleave rms_norm rnn_relu rnn_tanh roll adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d
batch_norm _native_batch_norm_legit_no_training scalar_tensor scaled_dot_product_attention scatter
scatter_add scatter_reduce slice_scatter select_scatter softmax _softmax _log_softmax sort stack
std std_mean sum take_along_dim topk tril triu upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
var var_mean zeros zeros_like _to_copy constant_pad_nd reflection_pad1d reflection_pad2d
reflection_pad3d replication_pad1d replication_pad2d replication_pad3d searchsorted bucketize
cdist cosine_similarity im2col col2im lift_fresh_copy embedding_bag _embedding_bag bilinear
channel_shuffle local_response_norm lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _weight_norm
affine_grid_generator max_unpool2d max_unpool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d diff logcumsumexp
hann_window hamming_window kthvalue quantile nanmedian nanmean nansum vdot inner kron trapezoid
linalg_inv linalg_det linalg_solve linalg_cholesky linalg_matrix_norm linalg_norm linalg_cross
fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn
fft_fftshift fft_ifftshift matrix_exp stft linalg_svd linalg_qr linalg_eigh
"""

_MAY_ALIAS: Final = """
alias atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to chunk contiguous detach
diagonal dropout alpha_dropout feature_dropout einsum expand expand_as flatten index lift_fresh
meshgrid movedim mT narrow numpy_T pad permute reshape reshape_as select slice split
split_with_sizes squeeze swapaxes swapdims t tensor_split tensordot to transpose type_as unbind
unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as _unsafe_view moveaxis ravel
hsplit vsplit dsplit float_power mH adjoint real imag view_as_real view_as_complex
"""

_ALSO_IN_PLACE: Final = """
fill zero dropout copy masked_fill index_put index_copy index_add index_fill scatter scatter_add
tril triu alpha_dropout feature_dropout masked_scatter
"""

INTEGER_OPERATORS: Final = frozenset({"add", "sub", "mul", "floordiv", "mod", "neg"})
"""Arithmetic on the batch size (``_operator.mul`` and so on): integers in, an integer out."""

FRESH: Final = frozenset((_POINTWISE + _FRESH).split()) | {"sym_size", "sym_numel"}
"""Results are new memory (or plain integers): changing them in place changes no argument."""

IN_PLACE: Final = frozenset(f"{name}_" for name in (_POINTWISE + _ALSO_IN_PLACE).split())
"""They write their first argument and return it."""

ALLOWED: Final = FRESH | frozenset(_MAY_ALIAS.split()) | IN_PLACE

# Checks that export leaves behind; they compute nothing, and the manifest's signature replaces
# them. Dropped at export, and not accepted in a bundle.
DROPPED_AT_EXPORT: Final = frozenset(
    {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
)

_ATEN: Final = re.compile(r"aten\.([a-zA-Z_][a-zA-Z0-9_]{0,63})\.([a-zA-Z_][a-zA-Z0-9_]{0,63})")


def split_target(target: str) -> tuple[str, str, str]:
    """``"aten.add.Tensor"`` as ``("aten", "add", "Tensor")``, if a program may call it.

    Raises:
        RegistrationRefused: the name is not on the closed list.
    """
    if target == "_operator.getitem":
        return ("_operator", "getitem", "")
    if target.startswith("_operator.") and target[10:] in INTEGER_OPERATORS:
        return ("_operator", target[10:], "")
    found = _ATEN.fullmatch(target)
    if found is None or found[1] not in ALLOWED or "out" in found[2].split("_"):
        raise RegistrationRefused(
            f"operator {target[:120]!r}", "it is not on the closed list of operators"
        )
    return ("aten", found[1], found[2])
