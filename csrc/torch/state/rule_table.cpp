#include "torch/state/rule_table.h"

#include "torch/bind.h"
#include "torch/state/arrays.h"

namespace amp_mp {
namespace {

py::object interned(const std::string& name) {
  // A step looks up thousands of entries, and a dict compares strings that are not interned letter
  // by letter.
  return owned(PyUnicode_InternFromString(name.c_str()));
}

// The end of an entry's name, after the state's, if the entry holds the state in this format:
// "_m8". Empty for plain numbers, whose dtype says the format.
const std::string& ending_of(Format format) {
  static const auto& endings = *[] {
    auto* found = new std::vector<std::string>;
    for (const FormatInfo& info : kFormats) {
      found->push_back("_" + std::string(info.name));
      for (const std::string plain : {"float32", "bfloat16", "float16"})
        if ((found->back() + "_").starts_with("_" + plain + "_"))
          found->back() = found->back().substr(1 + plain.size());
    }
    return found;
  }();
  return endings[size_t(format)];
}

// Whether users may choose it for a state; for stochastic forms they choose the plain name.
bool is_of_states(Format format) {
  const FormatInfo& info = kFormats[int(format)];
  return info.is(kForState) && !std::string_view(info.name).ends_with("_stochastic");
}

KeptState kept_state(const std::string& name, Kind kind, bool late, const char* initial,
                     bool of_rows = false) {
  KeptState state{interned(name), kind, late, initial ? interned(initial) : py::none(),
                  of_rows,        {}};
  for (int f = 0; f < kFormatCount; ++f) {
    if (!is_of_states(Format(f))) continue;
    const std::string entry = name + ending_of(Format(f));
    const bool grouped = kFormats[f].is(kGrouped);
    state.formats.push_back({Format(f), dtype_of(Format(f)), interned(entry),
                             grouped ? interned(entry + "_scale") : py::none()});
  }
  return state;
}

HyperNumber hyper_number(const Number& number) {
  const std::string key = number.key;
  const size_t bracket = key.find('[');
  HyperNumber found{hyper_member(number.as), interned(key.substr(0, bracket)), -1,
                    number.when ? interned(number.when) : py::none(), number.range};
  if (found.range == Range::of_member) found.range = found.member->range;
  if (bracket != std::string::npos) found.index = key[bracket + 1] - '0';
  return found;
}

// By name, what each state of these rules may be stored as.
py::dict kinds_of(const Layouts& rules) {
  static constexpr const char* kNames[] = {"moment", "matrix_moment", "square", "exact"};
  py::dict kinds;
  refuse_none(rules);
  for (const Layout& rule : rules)
    for (const KeptState& state : rule->states)
      kinds[state.name] = state.of_rows ? "row" : kNames[int(state.kind)];
  return kinds;
}

RuleLayout declared(const RuleInfo& rule) {
  RuleLayout layout;
  layout.rule = &rule;
  for (const RuleState& state : rule.kept)
    layout.states.push_back(kept_state(state.name, state.kind, state.late, state.initial));
  // The clock's fourth number, "layer" if the rule has none of its own.
  const OwnNumber own = rule.has_own_number ? rule.own : OwnNumber{"layer", 0, true};
  layout.step = interned("step");
  layout.own = interned(own.name);
  layout.own_start = own.start;
  layout.own_is_late = own.late;
  for (const Number& number : rule.numbers) layout.numbers.push_back(hyper_number(number));
  return layout;
}

}  // namespace

std::shared_ptr<RuleLayout> RuleLayout::of(const std::string& op, const py::object& row_state,
                                           const std::vector<std::string>& options) {
  const RuleInfo* const rule = rule_named(op.c_str());
  if (!rule) throw py::value_error("amp_mp: \"" + op + "\" is not an operator");
  const auto layout = std::make_shared<RuleLayout>(declared_rules()[size_t(rule->index)]);
  if (!row_state.is_none())
    layout->states.push_back(kept_state(text_of(row_state), Kind::exact, true, nullptr, true));
  for (const char* name : {"memory", "master", "rounding", "offload"})
    layout->options.push_back(interned(name));
  for (const KeptState& state : layout->states) layout->options.push_back(state.name);
  for (const std::string& option : options) layout->options.push_back(interned(option));
  return layout;
}

void refuse_none(const Layouts& rules) {
  for (const Layout& rule : rules)
    if (!rule) throw py::type_error("amp_mp: a rule is None");
}

const std::vector<RuleLayout>& declared_rules() {
  static const auto& layouts = *[] {
    auto* made = new std::vector<RuleLayout>;
    for (const RuleInfo& rule : rules()) made->push_back(declared(rule));
    return made;
  }();
  return layouts;
}

py::object entry_name(const std::string& state, Format format) {
  return interned(state + ending_of(format));
}

bool KeptState::may_be(Format format) const {
  if (of_rows || kind == Kind::exact) return format == Format::float32;
  return kFormats[int(format)].is(is_moment(kind) ? kForMoment : kForSquare);
}

const std::vector<MasterEntry>& master_entries() {
  static const auto& entries = *[] {
    auto* found =
        new std::vector<MasterEntry>{{interned("master"), "float32", std::nullopt, at::kFloat}};
    for (int f = 0; f < kFormatCount; ++f) {
      const at::ScalarType weight = dtype_of(Format(f));
      if (!kFormats[f].is(kSplit) || weight == at::kFloat) continue;
      // Remainders beside weights of the other dtype are other numbers, hence another name.
      const std::string name = kFormats[f].name, dtype = name.substr(0, name.find('_'));
      const int bits = 8 * kFormats[f].second_width / kFormats[f].group;
      const std::string entry =
          "remainder" + std::to_string(bits) + (weight == at::kBFloat16 ? "" : "_" + dtype);
      found->push_back(
          {interned(entry), name.substr(dtype.size() + 1), weight, second_dtype_of(Format(f))});
    }
    return found;
  }();
  return entries;
}

const MasterEntry* master_entry(const std::string& format, at::ScalarType weight) {
  for (const MasterEntry& each : master_entries())
    if (each.format == format && each.weight.value_or(weight) == weight) return &each;
  return nullptr;
}

const MasterEntry* master_entry(const std::string& format, py::handle param) {
  const at::ScalarType weight = local_of(param).scalar_type();
  const MasterEntry* const entry = is_low(weight) ? master_entry(format, weight) : nullptr;
  const bool fits = !entry || !is_packed(*entry) || has_groups(kPackedMaster, param);
  return fits ? entry : master_entry("split24", weight);
}

std::vector<py::object> RuleLayout::keys() const {
  std::vector<py::object> keys;
  const auto add = [&](const py::object& key) {
    for (const py::object& known : keys)
      if (known.is(key)) return;
    keys.push_back(key);
  };
  for (const MasterEntry& master : master_entries()) add(master.entry);
  add(step);
  if (rule->has_own_number) add(own);
  for (const KeptState& state : states)
    for (const StoredFormat& stored : state.formats) {
      add(stored.entry);
      if (!stored.scales.is_none()) add(stored.scales);
    }
  return keys;
}

void bind_rule_table(py::module_& m) {
  py::class_<RuleLayout, Layout>(m, "Rule")
      .def(py::init(&RuleLayout::of), py::arg("operator"), py::kw_only(),
           py::arg("row_state") = py::none(), py::arg("options") = std::vector<std::string>())
      .def_property_readonly("kinds", [](const Layout& rule) { return kinds_of({rule}); })
      .def_property_readonly("is_layerwise",
                             [](const RuleLayout& rule) { return rule.rule->is_layerwise(); })
      .def_property_readonly("number_keys",
                             [](const RuleLayout& rule) {
                               py::set keys;
                               for (const HyperNumber& number : rule.numbers) keys.add(number.key);
                               return keys;
                             })
      .def_property_readonly(
          "own_number", [](const RuleLayout& rule) -> std::optional<std::pair<py::object, double>> {
            if (!rule.rule->has_own_number) return std::nullopt;
            return std::pair(rule.own, rule.own_start);
          });
  m.def("kinds_of", &kinds_of, py::arg("rules"));
  m.def("clock_entries", [] {
    py::set names;
    for (const RuleLayout& rule : declared_rules())
      for (const py::object& name : {rule.step, rule.own}) names.add(name);
    return names;
  });
  m.def("allowed_numbers", [] {
    static constexpr const char* kAllowed[] = {"", "any", "not negative", "[0, 1)", "[0, 1]"};
    py::dict allowed = py::dict(py::arg("maximize") = "flag");
    for (const RuleLayout& rule : declared_rules()) {
      for (const HyperNumber& number : rule.numbers) {
        std::string key = text_of(number.key);
        if (number.index >= 0) key += "[" + std::to_string(number.index) + "]";
        const char* const range = number.member->flag ? "flag" : kAllowed[int(number.range)];
        if (!allowed.contains(key)) allowed[py::str(key)] = range;
      }
      for (const KeptState& state : rule.states)
        if (!state.initial.is_none()) allowed[state.initial] = "not negative";
    }
    return allowed;
  });
  m.def("coded_endings", [] {
    py::list endings;
    for (int f = 0; f < kFormatCount; ++f)
      if (is_of_states(Format(f)) && !ending_of(Format(f)).empty())
        endings.append(ending_of(Format(f)));
    return endings;
  });
  m.def("master_entries", [] {
    py::dict dtypes;
    for (const MasterEntry& each : master_entries()) dtypes[each.entry] = py::cast(each.dtype);
    return dtypes;
  });
}

}  // namespace amp_mp
