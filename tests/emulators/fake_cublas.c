// cublasGemmEx as cuBLAS documents it, in plain loops over host memory:
// C = alpha op(A) op(B) + beta C, all column-major, op(A) [m, k], op(B) [k, n], C [m, n].
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { OP_N = 0, OP_T = 1, R_32F = 0, R_16F = 2, R_16BF = 14, COMPUTE_32F = 68, DEFAULT = -1 };
enum { SUCCESS = 0, INVALID_VALUE = 7 };

void* last_handle;
int calls;
void (*before)(void);  // called before a product is computed; may be null
int answer;            // another status than success, to be returned at once

static float half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size =
      exponent ? ldexpf((float)(fraction + 1024), exponent - 25) : ldexpf((float)fraction, -24);
  return bits >> 15 ? -size : size;
}

static float element(const void* array, int type, int64_t at) {
  if (type == R_32F) return ((const float*)array)[at];
  const uint16_t bits = ((const uint16_t*)array)[at];
  if (type == R_16F) return half(bits);
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

int cublasGemmEx(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                 const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                 const void* beta, void* c, int c_type, int ldc, int compute_type, int algorithm) {
  last_handle = handle;
  ++calls;
  if (answer) return answer;
  const int a_rows = transa == OP_N ? m : k, b_rows = transb == OP_N ? k : n;
  if (m < 0 || n < 0 || k < 0 || lda < (a_rows > 1 ? a_rows : 1) ||
      ldb < (b_rows > 1 ? b_rows : 1) || ldc < (m > 1 ? m : 1))
    return INVALID_VALUE;
  if ((transa != OP_N && transa != OP_T) || (transb != OP_N && transb != OP_T) ||
      a_type != b_type || (a_type != R_16F && a_type != R_16BF && a_type != R_32F) ||
      c_type != R_32F || compute_type != COMPUTE_32F || algorithm != DEFAULT)
    return INVALID_VALUE;
  if (before) before();
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += element(a, a_type, transa == OP_N ? i + l * lda : l + i * lda) *
               element(b, b_type, transb == OP_N ? l + j * ldb : j + l * ldb);
      float* result = (float*)c + i + j * ldc;
      *result = *(const float*)alpha * sum + *(const float*)beta * *result;
    }
  return SUCCESS;
}
