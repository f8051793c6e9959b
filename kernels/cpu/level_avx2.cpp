// float activations on AVX2 with FMA.
//
// The pragma gives every function below it these instructions; only calls that are made after the processor was asked
// need them. Nothing from the standard library may be instantiated below it (see plain.h).
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention_plan.h"
#include "plain.h"
#include "pool.h"
#include "ranks.h"

#pragma GCC target("avx2,fma")
#define INLINE static inline __attribute__((always_inline))
#define LEVEL avx2
#define LEVEL_AVX2

namespace quire_avx2 {

#include "simd_avx2.h"

#include "kernels.h"

}  // namespace quire_avx2
