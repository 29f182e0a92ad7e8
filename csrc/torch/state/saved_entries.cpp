// Makes the table of the entries that a state dict may have from what the rules declare.
#include "torch/state/saved_state.h"

namespace amp_mp {

using Holds = SavedEntry::Holds;

SavedEntries::SavedEntries(const Layouts& rules) {
  refuse_none(rules);
  const auto add = [&](const SavedEntry& entry) { entries_.insert_or_assign(entry.name, entry); };
  for (const RuleLayout& rule : declared_rules()) {
    add({text_of(rule.step), "", "", Holds::step, {}});
    add({text_of(rule.own), "", "", Holds::own_number, {}});
  }
  add({"beta_powers", "", "", Holds::unused, {}});  // of amp_mp 0.2: step and betas give them
  const auto coded = [&](Holds holds, const py::object& entry, const std::string& state,
                         const std::string& format, at::ScalarType dtype,
                         const std::string& scale = "", int64_t group = 1) {
    const bool in_bytes = dtype == at::kShort;
    add({text_of(entry), state, format, holds, in_bytes ? at::kByte : dtype, in_bytes, scale,
         group});
  };
  for (const MasterEntry& each : master_entries()) {
    if (each.dtype == at::kFloat)  // plain numbers, of any precision
      add({text_of(each.entry), "master", each.format, Holds::master, {}});
    else
      coded(Holds::master, each.entry, "master", each.format, each.dtype, "",
            is_packed(each) ? kPacked : 1);
  }
  for (const Layout& rule : rules)
    for (const KeptState& kept : rule->states) {
      const std::string name = text_of(kept.name);
      add({name, name, "", kept.of_rows ? Holds::rows : Holds::state, {}});
      std::string can;
      for (const StoredFormat& stored : kept.formats)
        if (kept.may_be(stored.format))
          can += (can.empty() ? "" : ", ") + std::string(kFormats[int(stored.format)].name);
      for (const StoredFormat& stored : kept.formats) {
        if (stored.entry.is(kept.name)) continue;
        const std::string format = kFormats[int(stored.format)].name;
        if (!kept.may_be(stored.format)) {
          const std::string wrong = "is stored as '" + format + "', but can be " + can + " only";
          refused_[text_of(stored.entry)] = wrong;
          continue;
        }
        const std::string scale = stored.scales.is_none() ? "" : text_of(stored.scales);
        coded(Holds::state, stored.entry, name, format, stored.dtype, scale);
        if (!scale.empty())
          add({scale, name, format, Holds::scales, second_dtype_of(stored.format), false, "",
               kFormats[int(stored.format)].group});
      }
    }
}

const SavedEntry* SavedEntries::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

std::string SavedEntries::refusal(const std::string& name) const {
  const auto found = refused_.find(name);
  return found == refused_.end() ? "" : found->second;
}

std::set<std::string> SavedEntries::in_bytes() const {
  std::set<std::string> names;
  for (const auto& [name, entry] : entries_)
    if (entry.in_bytes) names.insert(name);
  return names;
}

}  // namespace amp_mp
