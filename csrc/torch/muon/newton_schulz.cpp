#include "torch/muon/newton_schulz.h"

#include <cmath>
#include <map>
#include <optional>
#include <string>

#include "torch/python/objects.h"

namespace amp_mp::muon {
namespace {

constexpr int64_t kMostSteps = 100;  // torch.optim.Muon's bound
constexpr int64_t kDefaultSteps = 5;
// From here on Gram matrices are faster on a CPU: docs/muon.md has the measurement.
constexpr double kGramFrom = 2;
// Jordan et al., "Muon" (2024); torch.optim.Muon's default.
constexpr Polynomial kJordan = {3.4445, -4.7750, 2.0315};

// In low precision a singular value can round to above 1, where the next polynomial may grow fast.
// Every iteration but the last takes x / 1.01 in place of x (Polar Express, algorithm 1).
std::vector<Polynomial> with_margin(std::vector<Polynomial> found) {
  for (size_t i = 0; i + 1 < found.size(); ++i)
    for (int k = 0; k < 3; ++k) found[i][size_t(k)] /= std::pow(1.01, 2 * k + 1);
  return found;
}

const std::map<std::string, std::vector<Polynomial>>& named() {
  static const std::map<std::string, std::vector<Polynomial>> sets = {
      {"quintic", std::vector<Polynomial>(5, kJordan)},
      // Amsel et al., "The Polar Express" (arXiv 2505.16932), algorithm 1: each polynomial is the
      // best for where the one before leaves singular values of [1e-3, 1].
      {"polar_express", with_margin({{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                     {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                     {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                     {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                     {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                                     {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                                     {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
                                     {1.875, -1.25, 0.375}})},
      // Grishina et al., "Accelerating Newton-Schulz iteration" (arXiv 2506.10935): the same by
      // Remez' algorithm without a bound on how flat a polynomial may be. The published numbers
      // have four digits, and no margin: in bfloat16 they diverge on a matrix of rank 1.
      {"cans", with_margin({{8.470328803848073, -25.10807470666187, 18.629275599118007},
                            {4.182834183293943, -3.108701109889242, 0.5806066813500492},
                            {3.9618572789615976, -2.954063746359376, 0.5629761179538959},
                            {3.2865862170279603, -2.4647201345312815, 0.5073576938614547},
                            {2.273749994434038, -1.6446603679080687, 0.41619092749788617}})},
      // DeepSeek-AI, "DeepSeek-V4" (2026): eight steps that converge fast, two that converge to 1.
      {"deepseek",
       [] {
         std::vector<Polynomial> found(8, kJordan);
         found.resize(10, {2, -1.5, 0.5});
         return found;
       }()},
  };
  return sets;
}

bool is_list(const py::handle& found) {
  return py::isinstance<py::tuple>(found) || py::isinstance<py::list>(found);
}

std::optional<Polynomial> polynomial(const py::handle& found) {
  py::detail::make_caster<Polynomial> caster;
  if (!is_list(found) || !caster.load(found, true)) return std::nullopt;
  const Polynomial& made = caster;
  const bool is_finite = std::isfinite(made[0]) && std::isfinite(made[1]) && std::isfinite(made[2]);
  return is_finite ? std::optional(made) : std::nullopt;
}

std::vector<Polynomial> listed(const py::object& coefficients) {
  if (py::isinstance<py::str>(coefficients)) {
    const auto found = named().find(py::cast<std::string>(coefficients));
    if (found != named().end()) return found->second;
  } else if (const auto only = polynomial(coefficients)) {
    return std::vector<Polynomial>(kDefaultSteps, *only);
  } else if (is_list(coefficients)) {
    std::vector<Polynomial> found;
    for (const py::handle each : coefficients)
      if (const auto made = polynomial(each)) found.push_back(*made);
    if (!found.empty() && found.size() == py::len(coefficients)) return found;
  }
  std::string names;
  for (const auto& [name, set] : named()) names += "'" + name + "', ";
  TORCH_CHECK_VALUE(false, "ns_coefficients must be ", names,
                    "three finite numbers, or a list of such threes; found ",
                    repr_of(coefficients));
}

double gram_from(const py::object& found) {
  if (py::isinstance<py::bool_>(found)) return py::cast<bool>(found) ? 1 : INFINITY;
  const bool is_auto = py::isinstance<py::str>(found) && py::cast<std::string>(found) == "auto";
  TORCH_CHECK_VALUE(is_auto, "ns_gram must be True, False or 'auto', found ", repr_of(found));
  return kGramFrom;
}

// A set's name, one polynomial for all iterations, or a list of them, of which the last repeats;
// steps: None or the number of iterations.
std::vector<Polynomial> iterations_of(const py::object& coefficients, const py::object& steps) {
  std::vector<Polynomial> found = listed(coefficients);
  if (steps.is_none()) return found;
  const bool is_whole = py::isinstance<py::int_>(steps) && !py::isinstance<py::bool_>(steps);
  int overflow = 0;
  const long long count = is_whole ? PyLong_AsLongLongAndOverflow(steps.ptr(), &overflow) : -1;
  TORCH_CHECK_VALUE(count >= 0 && count < kMostSteps && !overflow,
                    "ns_steps must be None or a whole number of [0, ", kMostSteps, "), found ",
                    repr_of(steps));
  found.resize(size_t(count), found.back());
  return found;
}

}  // namespace

NewtonSchulz newton_schulz_of(const py::dict& group) {
  const py::object entry = group.attr("get");
  const py::object dtype = entry("ns_dtype", py::none());
  py::detail::make_caster<at::ScalarType> caster;
  at::ScalarType products = at::kBFloat16;
  if (!dtype.is_none())
    products = caster.load(dtype, true) ? at::ScalarType(caster) : at::ScalarType::Undefined;
  TORCH_CHECK_VALUE(products == at::kBFloat16 || products == at::kHalf || products == at::kFloat,
                    "ns_dtype must be torch.bfloat16, torch.float16 or torch.float32, found ",
                    repr_of(dtype));
  return {
      iterations_of(entry("ns_coefficients", py::str("quintic")), entry("ns_steps", py::none())),
      py::cast<double>(entry("eps", py::float_(0.0))), products,
      gram_from(entry("ns_gram", py::bool_(false)))};
}

}  // namespace amp_mp::muon
