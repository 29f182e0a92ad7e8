// The factors of QK-Clip (Kimi Team, "Kimi K2", 2025, section 2.1); optim/qk_clip.py has the rest.
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <array>
#include <cmath>
#include <set>

#include "torch/bind.h"
#include "torch/python/objects.h"

namespace amp_mp {
namespace {

// How many there are of each, and the rows of a head; zeros where they do not fit.
struct Heads {
  int64_t queries = 0, keys = 0, rows = 0;
};

Heads heads_of(const at::Tensor& max_logits, const std::vector<int64_t>& query_rows,
               const std::vector<int64_t>& key_rows) {
  const int64_t heads = max_logits.dim() == 1 ? max_logits.numel() : 0;
  const auto are_equal = [](const std::vector<int64_t>& all) {
    return std::set(all.begin(), all.end()).size() == 1;
  };
  if (heads == 0 || !are_equal(query_rows) || !are_equal(key_rows)) return {};
  const int64_t queries = query_rows[0], rows = queries / heads;
  if (rows == 0 || queries % heads != 0 || key_rows[0] % rows != 0) return {};
  const int64_t keys = key_rows[0] / rows;
  return keys == 0 || heads % keys != 0 ? Heads{} : Heads{heads, keys, rows};
}

std::vector<int64_t> rows_of(const Tensors& params) {
  std::vector<int64_t> rows;
  for (const at::Tensor& param : params) rows.push_back(param.dim() > 0 ? param.size(0) : 1);
  return rows;
}

// QK-Clip, optim/qk_clip.py: gamma of each query head, and the factors of all rows of the queries'
// weights and of the keys', float32. max_logits [query heads]; queries, keys: weights and biases.
std::array<at::Tensor, 3> qk_clip_factors(const py::object& given, double threshold, double alpha,
                                          const Tensors& queries, const Tensors& keys) {
  if (!is_tensor(given))
    throw py::type_error("max_logits must be a tensor, found " + repr_of(given));
  const at::Tensor max_logits = whole_of(given);
  check_plain(max_logits, {"max_logits"});
  TORCH_CHECK_VALUE(threshold > 0 && std::isfinite(threshold),
                    "threshold must be finite and above 0, found ", threshold);
  TORCH_CHECK_VALUE(alpha >= 0 && alpha <= 1, "alpha must be in [0, 1], found ", alpha);
  for (const at::Tensor& query : queries)
    for (const at::Tensor& key : keys)
      TORCH_CHECK_VALUE(!query.is_same(key), "q_proj and k_proj must have parameters of their own");
  const std::vector<int64_t> query_rows = rows_of(queries), key_rows = rows_of(keys);
  const Heads heads = heads_of(max_logits, query_rows, key_rows);
  TORCH_CHECK_VALUE(heads.rows > 0, "max_logits (", describe(max_logits),
                    ") must have one number for each query head, all heads having the same rows; "
                    "q_proj has tensors of ",
                    at::IntArrayRef(query_rows), " rows, k_proj of ", at::IntArrayRef(key_rows));
  const at::Tensor found = max_logits.detach().to(at::kDouble);
  // A head without a finite maximum, or with one below the threshold, is not scaled: gamma is 1.
  const at::Tensor limit = at::full_like(found, threshold);
  const at::Tensor gamma = limit.div(at::where(found.isfinite(), found, limit).maximum(limit));
  // W_k = gamma^(1 - alpha) W_k; of query heads that share a key head the largest, so that none of
  // them needs a factor above 1.
  const int64_t shared = heads.queries / heads.keys;
  const at::Tensor of_keys = gamma.pow(1 - alpha).view({heads.keys, shared}).amax(1);
  // W_q = gamma^alpha W_q where it has its key head for itself.
  const at::Tensor of_queries = gamma.div(of_keys.repeat_interleave(shared)).clamp_max(1.0);
  return {gamma.to(at::kFloat), of_queries.to(at::kFloat).repeat_interleave(heads.rows),
          of_keys.to(at::kFloat).repeat_interleave(heads.rows)};
}

}  // namespace

void bind_qk_clip(py::module_& m) {
  m.def("qk_clip_factors", &qk_clip_factors, py::arg("max_logits"), py::arg("threshold"),
        py::arg("alpha"), py::arg("queries"), py::arg("keys"));
}

}  // namespace amp_mp
