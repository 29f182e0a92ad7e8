#pragma once
// Streams whose work is delayed: what is queued runs when the host waits for it, in a random order
// that CUDA allows. Work of one stream runs in its order, and what waits for a mark in another
// stream runs behind that mark; nothing else is promised. Without a delay, all work runs at once.
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>

namespace cuda_on_cpu {

struct StreamId {
  int device;
  intptr_t handle;
  auto operator<=>(const StreamId&) const = default;
};

// A stream of the device that nobody else has. It is forgotten as soon as it is idle.
StreamId nameless_stream(int device);

// Delays all work from now on, in the order that the seed gives, or ends the delay. What is queued
// runs first.
void set_delay(std::optional<uint64_t> seed);
bool is_delayed();

// Runs the work behind what the stream has already; without a delay, now.
void queue(StreamId stream, std::function<void()> work);

// A place in a stream, which is reached when all that was queued before has run.
using Mark = uint64_t;
Mark mark(StreamId stream);
void wait_for(StreamId stream, Mark mark);  // what is queued from now on runs behind the mark
bool is_reached(Mark mark);
bool is_idle(int device);  // nothing of it is queued

// The host waits: run what is necessary, and by chance other things.
void finish(Mark mark);
void finish(StreamId stream);
void finish_device(int device);
void finish_all();

}  // namespace cuda_on_cpu
