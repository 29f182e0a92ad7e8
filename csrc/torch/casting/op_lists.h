#pragma once
// The two named tables of operators, group by group, with the reason for each.
//
// Operators are named as in the dispatcher, without namespace (aten) and overload: "sum" means sum,
// sum.dim_IntList and so on, however it is called: torch., Tensor., F., torch.linalg., a module,
// C++. The in-place form of an operator on a list (`exp_`) is on it too. Names that the running
// torch lacks are skipped.
#include <array>

namespace amp_mp::casting {

struct OpGroup {
  const char *policy, *ops;
};

// clang-format off

// Groups of operators with one policy each: Apex's lists of 2018 and what they missed, on CPU and
// CUDA alike.
inline constexpr std::array kApexOps = {
  // Matrix products: fast in low precision, with float32 sums inside; on a CPU only from a size
  // on, and never for a matrix and a vector.
  OpGroup{"low_precision_if_large",
      "linear matmul mm bmm addmm _addmm_activation addbmm baddbmm mv addmv"},
  // Convolutions, attention, recurrent cells and other products, likewise, of any size.
  OpGroup{"low_precision",
      "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution "
      "_convolution prelu addr linalg_vecdot einsum chain_matmul linalg_multi_dot inner outer "
      "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
      "scaled_dot_product_attention _native_multi_head_attention _thnn_fused_lstm_cell "
      "_thnn_fused_gru_cell"},
  // Functions that leave float16's range or lose its digits.
  OpGroup{"float32",
      "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus "
      "renorm cdist pdist dist logsumexp"},
  // Normalisation: sums of squares and small differences.
  OpGroup{"float32",
      "layer_norm native_layer_norm rms_norm group_norm native_group_norm cosine_similarity norm "
      "frobenius_norm nuclear_norm linalg_norm linalg_matrix_norm std var std_mean var_mean"},
  // Sums: float32 inside and out, without a float32 copy of what is summed.
  OpGroup{"set_output_dtype",
      "softmax log_softmax sum mean prod cumsum cumprod linalg_vector_norm"},
  // Losses: logarithms and sums over a batch.
  OpGroup{"float32",
      "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d l1_loss mse_loss smooth_l1_loss "
      "huber_loss kl_div poisson_nll_loss cosine_embedding_loss hinge_embedding_loss "
      "margin_ranking_loss multilabel_margin_loss multi_margin_loss soft_margin_loss "
      "triplet_margin_loss binary_cross_entropy_with_logits ctc_loss"},
  // Interpolation and grids: coordinates need float32's digits.
  OpGroup{"float32",
      "grid_sampler upsample_nearest1d upsample_nearest2d upsample_nearest3d "
      "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
      "upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
      "upsample_bicubic2d _upsample_bicubic2d_aa"},
  // Several tensors of one dtype are asked for, and torch does not promote by itself.
  OpGroup{"widest",
      "addcdiv addcmul cross linalg_cross bilinear dot vdot tensordot index_put scatter_add cat "
      "stack lerp index_copy"},
  // oneDNN's recurrent layers: few CPUs have them in float16.
  OpGroup{"bfloat16_only",
      "mkldnn_rnn_layer"},
  // The logarithm of a rounded probability: use binary_cross_entropy_with_logits.
  OpGroup{"banned",
      "binary_cross_entropy"},
};

// Recurrent layers. On a GPU cuDNN takes their weights as one block, which torch casts by itself.
inline constexpr std::array kApexCpuOps = {OpGroup{"low_precision", "lstm gru rnn_tanh rnn_relu"}};

// What torch's own lists cast to low precision, by device, and to the widest dtype; single
// overloads, "conv1d" is the default one. Under "torch" only these get our kernels, for the cast
// cache; everything else is torch's.
inline constexpr std::array kTorchCpuOps = {
  OpGroup{"low_precision",
      "conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot "
      "baddbmm addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc "
      "conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu "
      "scaled_dot_product_attention _native_multi_head_attention"},
  OpGroup{"bfloat16_only", "mkldnn_rnn_layer"},
  OpGroup{"widest", "stack cat"},
};
inline constexpr std::array kTorchCudaOps = {
  OpGroup{"low_precision",
      "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
      "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul "
      "einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
      "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
      "_scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution "
      "cudnn_convolution_transpose"},
};

// clang-format on

}  // namespace amp_mp::casting
