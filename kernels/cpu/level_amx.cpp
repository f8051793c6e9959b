// bf16 activations on AVX-512, and products on AMX tiles.
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

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define INLINE static inline __attribute__((always_inline))
#define LEVEL amx
#define LEVEL_AMX
#define ACT_BF16

namespace quire_amx {

#include "simd_avx512.h"

#include "kernels.h"

}  // namespace quire_amx
