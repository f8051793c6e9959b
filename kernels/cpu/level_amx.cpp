// The instruction-set level amx: bf16 activations on AVX-512, with matrix products on AMX tiles.
#include "level_prelude.h"

#define LEVEL amx
#define LEVEL_AMX
#define LEVEL_TILES
#define ACT_BF16

// Every function below has these instructions. Python calls them only if quire_supports has returned 1 for the level.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

namespace quire_amx {

#include "simd_reduce.h"

#include "simd_avx512.h"

#include "level_body.h"

}  // namespace quire_amx
