// The instruction-set level avx2: float activations on AVX2 with FMA and F16C.
#include "level_prelude.h"

#define LEVEL avx2
#define LEVEL_AVX2

// Every function below has these instructions. Python calls them only if quire_supports has returned 1 for the level.
#pragma GCC target("avx2,fma,f16c")

namespace quire_avx2 {

#include "simd_reduce.h"

#include "simd_avx2.h"

#include "level_body.h"

}  // namespace quire_avx2
