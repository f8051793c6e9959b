// The instruction-set level avx512: float activations on AVX-512.
#include "level_prelude.h"

#define LEVEL avx512

// Every function below has these instructions. Python calls them only if quire_supports has returned 1 for the level.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")

namespace quire_avx512 {

#include "simd_reduce.h"

#include "simd_avx512.h"

#include "level_body.h"

}  // namespace quire_avx512
