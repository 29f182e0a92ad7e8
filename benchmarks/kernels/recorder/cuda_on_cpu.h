#pragma once
// The emulator of tests/emulators/cuda_on_cpu, in which a launch is also written down: its shape,
// the bytes of its arguments, and the memory as it is before the kernel runs.
#define launch launch_unrecorded
#include_next "cuda_on_cpu.h"
#undef launch

#include <string>

namespace cuda_on_cpu {

// What a kernel was launched with.
struct Launch {
  unsigned blocks = 0, threads = 0;
  std::string arguments;  // as CUDA lays them out
  std::string memory;     // by memory_of_process

  // Appends an argument, aligned to its own size.
  template <class T>
  void add(const T& argument) {
    arguments.resize((arguments.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    arguments.append(reinterpret_cast<const char*>(&argument), sizeof argument);
  }
};

extern Launch last_launch;

// Every byte that the process may write, by address. Pages of zeros are left out.
std::string memory_of_process();

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  last_launch = Launch();
  last_launch.blocks = blocks.x;
  last_launch.threads = threads.x;
  (last_launch.add<std::remove_cvref_t<Parameters>>(arguments), ...);
  last_launch.memory = memory_of_process();
  return launch_unrecorded(kernel, blocks, threads, stream, arguments...);
}

}  // namespace cuda_on_cpu
