// Runs two steps of a rule on the emulator and writes the second launch of its apply kernel to a
// file: arguments, memory before it, memory after it. What the kernel is launched with is therefore
// always what the library's own host code makes.
//
//     record_step FILE RULE NUMBERS SKEW GRAD MASTER COPY MOMENT SQUARE
//
// The last five are names of formats, "-" for no copy; SKEW is by how many elements each array is
// off an aligned address. NUMBERS is "usual", or "rare" for zeros, subnormal and large ones too.
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "plan.h"

// The rules that are compiled. apply.cu and decide.cu are included, so that they see this list.
#undef AMP_MP_FOR_EACH_RULE
#define AMP_MP_FOR_EACH_RULE(X) AMP_MP_RECORDED_RULES(X)

#include "cuda/apply.cu"
#undef AMP_MP_INSTANTIATE
#include "cuda/decide.cu"

cuda_on_cpu::Launch cuda_on_cpu::last_launch;

namespace {

using namespace amp_mp;

constexpr int64_t kSize = 8192;  // two chunks: the first is a full one

// A number as raw bytes.
template <class T>
void put(std::string& to, const T& x) {
  to.append(reinterpret_cast<const char*>(&x), sizeof x);
}

Format format_named(const std::string& name) {
  for (int f = 0; f < kFormatCount; ++f)
    if (name == kFormatNames[f]) return Format(f);
  throw std::invalid_argument("no format is called " + name);
}

// Numbers of one magnitude, of both signs: no zero, nothing that overflows. If `rare`, in two of
// three packs of eight there are others.
float number(int64_t i, uint32_t seed, bool rare) {
  constexpr float kSizes[] = {0, 1e-40f, 1, 1e-20f, 1, 1e12f, 1};
  const uint32_t x = (uint32_t(i) + seed) * 2654435761u;
  const float size = 0.5f + float(x >> 8) * 0x1p-24f;
  const float scale = rare && i / 8 % 3 != 0 ? kSizes[(i * 3 + i / 8) % 7] : 1;
  return (x & 1 ? -size : size) * scale;
}

// Bytes that begin `skew` behind an aligned address.
struct Bytes {
  std::vector<char> memory;
  char* at;

  Bytes(size_t bytes, size_t skew) : memory(bytes + 64) {
    at = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 + skew;
  }
  Bytes(const Bytes&) = delete;
};

struct Stored {
  Format format;
  Bytes data, rest;

  Stored(Format f, size_t skew)
      : format(f),
        data((kSize + skew) * info().width, skew * info().width),
        rest((kSize + skew) * info().rest_width, skew * info().rest_width) {}

  const FormatInfo& info() const { return kFormats[int(format)]; }
  Array array() { return {data.at, format, info().rest_width > 0 ? rest.at : nullptr}; }

  // A split master begins as its weight, without a remainder.
  void fill(uint32_t seed, bool rare) {
    for (int64_t i = 0; i < kSize; ++i) {
      const float x = number(i, seed, rare);
      const uint32_t word = to_bits(x);
      const auto narrow = encode<bfloat16>(x);
      if (info().width == 4) std::memcpy(data.at + 4 * i, &word, 4);
      if (info().width == 2) std::memcpy(data.at + 2 * i, &narrow, 2);
    }
  }
};

template <class Rule>
void record(std::ofstream& file, bool rare, size_t skew, char** formats) {
  Stored grad(format_named(formats[0]), skew), master(format_named(formats[1]), skew);
  const bool copies = formats[2] != std::string("-");
  Stored copy(copies ? format_named(formats[2]) : Format::float32, skew);
  const Format moment = format_named(formats[3]), square = format_named(formats[4]);
  const auto state_format = [&](int k) {
    const bool is_square = Rule::kKept.of[k].kind == Kind::square;
    return is_square ? square : k == 0 ? moment : Format::float32;
  };
  Stored first(state_format(0), skew), second(state_format(1), skew), third(state_format(2), skew);
  grad.fill(1, rare);
  master.fill(2, rare);

  Clock clock = {1, 0.9, 0.999, 0};
  Slot slot = {};
  slot.size = kSize;
  slot.grad = grad.array();
  slot.master = master.array();
  if (copies) slot.copy = copy.array();
  if (state_count<Rule> > 0) slot.state[0] = first.array();
  if (state_count<Rule> > 1) slot.state[1] = second.array();
  if (state_count<Rule> > 2) slot.state[2] = third.array();
  slot.clock = &clock;
  slot.tensor_index = 3;
  const Hyper hyper = {1e-3, 0.9,  0.999, 1e-8,  0.01,  0.9,   0.1,
                       0.01, 1e-3, 77,    false, false, false, false};
  Verdict verdict = {0, 1, 1, 1, 1};
  const Statistics sums = {double(kSize), 1, 0};
  NormInputs norms;
  norms.grads = norms.weights = &sums;
  const cuda::StepPlan plan = {&slot, 1, &hyper, cuda::chunk_of(&slot, 1), false};
  Bytes memory(cuda::table_bytes(cuda::kShortRows, 0), 0);
  const cuda::StepTable table = {memory.at, nullptr, cuda::kShortRows, 0};
  SlotRule<Rule> slot_rules[cuda::kShortRows];
  for (int step = 0; step < 2; ++step)
    if (const char* error =
            cuda::apply<Rule>(plan, table, nullptr, &verdict, {}, {}, slot_rules, norms, nullptr))
      throw std::runtime_error(error);

  const cuda_on_cpu::Launch& launch = cuda_on_cpu::last_launch;
  const std::string after = cuda_on_cpu::memory_of_process();
  const auto master_at = reinterpret_cast<uint64_t>(master.data.at);
  std::string head;
  for (const uint64_t x :
       {uint64_t(launch.blocks), uint64_t(launch.threads), master_at, uint64_t(master.info().width),
        uint64_t(kSize * master.info().width), uint64_t(launch.arguments.size()),
        uint64_t(launch.memory.size()), uint64_t(after.size())})
    put(head, x);
  file << head << launch.arguments << launch.memory << after;
}

}  // namespace

std::string cuda_on_cpu::memory_of_process() {
  constexpr uint64_t kPage = 4096;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t bytes = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    char access[5] = "";
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3) continue;
    if (std::string(access) != "rw-p") continue;
    ranges.emplace_back(begin, end);
    bytes += end - begin;
  }
  std::string all;
  // At once: a string that grows would free memory that is in the list.
  all.reserve(8 + ranges.size() * 16 + bytes / kPage * (kPage + 8));
  put(all, uint64_t(ranges.size()));
  for (const auto& [begin, end] : ranges) {
    put(all, begin);
    put(all, end);
  }
  for (const auto& [begin, end] : ranges)
    for (uint64_t at = begin; at < end; at += kPage) {
      const char* page = reinterpret_cast<const char*>(at);
      if (page[0] == 0 && !std::memcmp(page, page + 1, kPage - 1)) continue;
      put(all, at);
      all.append(page, kPage);
    }
  return all;
}

int main(int count, char** given) try {
  if (count != 10) throw std::invalid_argument("expected FILE RULE NUMBERS SKEW, five formats");
  std::ofstream file(given[1], std::ios::binary);
  const std::string rule = given[2];
  bool found = false;
#define AMP_MP_RECORD(Rule, op)                                                           \
  if (rule == #Rule)                                                                      \
    record<Rule>(file, given[3] == std::string("rare"), std::stoul(given[4]), given + 5), \
        found = true;
  AMP_MP_FOR_EACH_RULE(AMP_MP_RECORD)
  if (!found) throw std::invalid_argument("no rule is recorded that is called " + rule);
  file.flush();
  if (!file) throw std::runtime_error(std::string("cannot write ") + given[1]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
