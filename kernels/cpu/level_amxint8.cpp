// The instruction-set level amxint8: float activations on AVX-512, with integer products on VNNI and on AMX tiles.
#include "level_prelude.h"

#define LEVEL amxint8
#define LEVEL_VNNI
#define LEVEL_TILES

// Every function below has these instructions. Python calls them only if quire_supports has returned 1 for the level.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

namespace quire_amxint8 {

#include "simd_reduce.h"

#include "simd_avx512.h"

#include "level_body.h"

}  // namespace quire_amxint8
