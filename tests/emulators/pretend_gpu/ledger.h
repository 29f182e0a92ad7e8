#pragma once
// What the pretend GPU has been asked to do. On a real one every entry costs time; during a capture
// each is refused, since a CUDA graph would not hold it.
#include <c10/core/Device.h>

#include <string>
#include <vector>

namespace pretend_gpu {

struct Ledger {
  std::vector<std::string> operators;  // torch's, each of which launches at least one kernel
  std::vector<std::string> syncs;      // where the host waits for the device
};

// Raise c10::Error while a capture is under way.
void refuse_during_capture(const std::string& name);
void note_operator(const std::string& name);
void note_sync(const std::string& name);

void open_ledger();  // starts an empty one; there is one at a time, for all threads
Ledger close_ledger();

}  // namespace pretend_gpu
