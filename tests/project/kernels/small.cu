// Kernels whose results, loops and waits for the memory are known, for test_machine_code.py.

// Reads an address and then what lies there: two waits in a row.
extern "C" __global__ void chase(const unsigned long long* addresses, unsigned* out, int n) {
  unsigned sum = 0;
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    sum += *reinterpret_cast<const unsigned*>(addresses[i * 32 + threadIdx.x]);
    out[i * 32 + threadIdx.x] = sum;
  }
}

// Reads two arrays at once: one wait.
extern "C" __global__ void add(const float* x, const float* y, float* out, int n) {
#pragma unroll 1
  for (int i = 0; i < n; ++i)
    out[i * 32 + threadIdx.x] = x[i * 32 + threadIdx.x] + y[i * 32 + threadIdx.x];
}

// Lanes go different ways and for different times, meet again, and exchange numbers.
extern "C" __global__ void lanes(const float* x, float* out) {
  float t = x[threadIdx.x];
  const unsigned even = __ballot_sync(~0u, threadIdx.x % 2 == 0);
  if (threadIdx.x % 3 == 0) {
    t = sqrtf(t) / 3.0f;
  } else {
    t = t * 2.0f + 1.0f;
  }
  t += __shfl_xor_sync(~0u, t, 1);
  int steps = 0;
  for (unsigned k = threadIdx.x + 1; k != 1; ++steps) k = k % 2 ? 3 * k + 1 : k / 2;
  out[threadIdx.x] = t + __popc(even) + steps + __ffs(even << 3) + __clz(threadIdx.x + 1);
  if (threadIdx.x == 5) out[32] = t;
}

// Sums of 64 bits, shifts and comparisons.
extern "C" __global__ void integers(const long long* x, long long* out, long long by) {
  const long long a = x[threadIdx.x], b = x[31 - threadIdx.x];
  long long r = a * b + by;
  r += (unsigned long long)a >> (b & 63);
  r ^= a >> 7;
  r -= a < b ? a << 3 : b;
  r += min(int(a), int(b)) * (long long)max(unsigned(a), unsigned(b));
  out[threadIdx.x] = r;
}

// Through shared memory, in the other order.
extern "C" __global__ void reversed(const int* x, int* out) {
  __shared__ int all[32];
  all[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = all[31 - threadIdx.x];
}

// A branch on the result of an instruction that is not known.
extern "C" __global__ void cosine(const float* x, float* out) {
  if (x[threadIdx.x] < __cosf(x[threadIdx.x])) out[threadIdx.x] = 1;
}

// A double to a float and back; constants.
extern "C" __global__ void doubles(const double* x, double* out) {
  out[threadIdx.x] = double(float(x[threadIdx.x] * 3.0)) + double((long long)(x[threadIdx.x]));
}

// A switch, for which nvcc makes a table of jumps.
extern "C" __global__ void switched(const int* cases, const float* x, float* out) {
  float v = x[threadIdx.x], u = x[31 - threadIdx.x];
  switch (cases[threadIdx.x]) {
    case 0: v = sqrtf(v); break;
    case 1: v = v / u; break;
    case 2: v = fminf(u, v) + 3.0f; break;
    case 3:
      for (int i = 0; i < u; ++i) v *= 1.5f;
      break;
    case 4: v = floorf(v); break;
    case 5: v = u - v; break;
    case 6: v = fabsf(u) * 7.0f; break;
    default: v = 1.0f;
  }
  out[threadIdx.x] = v;
}
