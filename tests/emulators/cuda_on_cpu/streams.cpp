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
  std::map<StreamId, std::deque<Item>> items;  // none is empty
  std::set<Mark> pending;
  std::mt19937_64 chance;
  Mark last = 0;
  intptr_t nameless = 0;  // counts down: the streams of others have numbers from 0 on
};

std::atomic<bool> delayed = false;

// Never destroyed: tensors may be freed at the very end of the process.
Streams& streams() {
  static auto& all = *new Streams;
  return all;
}

// Runs the first item of a stream chosen by chance from those that do not have to wait.
void run_one(Streams& all) {
  std::vector<StreamId> ready;
  for (const auto& [stream, items] : all.items)
    if (!all.pending.contains(items.front().waits_for)) ready.push_back(stream);
  if (ready.empty()) throw std::logic_error("cuda_on_cpu: the streams wait for each other");
  const auto chosen = all.items.find(ready[all.chance() % ready.size()]);
  const Item item = std::move(chosen->second.front());
  chosen->second.pop_front();
  if (chosen->second.empty()) all.items.erase(chosen);
  all.pending.erase(item.reaches);  // an item with work reaches no mark
  if (item.work) item.work();
}

}  // namespace

bool is_delayed() { return delayed.load(); }

void set_delay(std::optional<uint64_t> seed) {
  finish_all();
  const std::lock_guard lock(streams().mutex);
  delayed = seed.has_value();
  if (seed) streams().chance.seed(*seed);
}

StreamId nameless_stream(int device) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  return {device, --all.nameless};
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
  const auto items = all.items.find(stream);
  if (items == all.items.end()) return made;
  all.pending.insert(made);
  items->second.push_back({{}, made});
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

bool is_idle(int device) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  for (const auto& [stream, items] : all.items)
    if (stream.device == device) return false;
  return true;
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
  while (!all.items.empty()) run_one(all);
}

}  // namespace cuda_on_cpu
