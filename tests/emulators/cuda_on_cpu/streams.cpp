#include "streams.h"

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace cuda_on_cpu {
namespace {

// Exactly one of the three is set.
struct Item {
  std::function<void()> work;
  Mark reaches = 0, waits_for = 0;
};

struct Streams {
  std::recursive_mutex mutex;  // recursive: work may free memory, which queues more work
  std::map<StreamId, std::deque<Item>> items;
  std::set<Mark> pending;
  std::mt19937_64 chance;
  Mark last = 0;
};

std::atomic<bool> delayed = false;

// Never destroyed: tensors may be freed at the very end of the process.
Streams& streams() {
  static auto& all = *new Streams;
  return all;
}

// Runs the first item of a stream chosen by chance from those that do not have to wait.
void run_one(Streams& all) {
  std::vector<std::deque<Item>*> ready;
  for (auto& [stream, items] : all.items)
    if (!items.empty() && !all.pending.contains(items.front().waits_for)) ready.push_back(&items);
  if (ready.empty()) throw std::logic_error("cuda_on_cpu: the streams wait for each other");
  std::deque<Item>& items = *ready[all.chance() % ready.size()];
  const Item item = std::move(items.front());
  items.pop_front();
  if (item.work) item.work();
  all.pending.erase(item.reaches);
}

}  // namespace

bool is_delayed() { return delayed.load(); }

void set_delay(std::optional<uint64_t> seed) {
  finish_all();
  const std::lock_guard lock(streams().mutex);
  delayed = seed.has_value();
  if (seed) streams().chance.seed(*seed);
}

void queue(StreamId stream, std::function<void()> work) {
  if (!is_delayed()) return work();
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  all.items[stream].push_back({std::move(work)});
}

Mark mark(StreamId stream) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const Mark made = ++all.last;
  std::deque<Item>& items = all.items[stream];
  if (items.empty()) return made;
  all.pending.insert(made);
  items.push_back({{}, made});
  return made;
}

void wait_for(StreamId stream, Mark mark) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  if (all.pending.contains(mark)) all.items[stream].push_back({{}, 0, mark});
}

bool is_reached(Mark mark) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  return !all.pending.contains(mark);
}

void finish(Mark mark) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  while (all.pending.contains(mark)) run_one(all);
}

void finish(StreamId stream) { finish(mark(stream)); }

void finish_device(int device) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  std::vector<StreamId> of_device;
  for (const auto& [stream, items] : all.items)
    if (stream.device == device) of_device.push_back(stream);
  for (const StreamId stream : of_device) finish(stream);
}

void finish_all() {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const auto is_waiting = [&] {
    for (const auto& [stream, items] : all.items)
      if (!items.empty()) return true;
    return false;
  };
  while (is_waiting()) run_one(all);
}

}  // namespace cuda_on_cpu
