#pragma once
// What amp.build_info() says of the build; the build writes the source (build_tools/generated.py).

namespace amp_mp {

struct BuildFacts {
  const char* torch;               // the version that this binding was compiled for
  const char* cuda_toolkit;        // "" without CUDA
  const char* cuda_architectures;  // such as "sm_90 compute_90"
  const char* commit;              // "" if unknown
};

extern const BuildFacts build_facts;

}  // namespace amp_mp
