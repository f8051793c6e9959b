// The first include of each level_*.cpp, before the pragma that selects the instructions of the level.
//
// The headers here are compiled for the base instruction set. After the pragma no template of the standard library may
// be instantiated: the linker keeps one copy of each instance, which could then hold instructions that the processor
// lacks (see sorting.h).
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention_plan.h"
#include "ranks.h"
#include "sorting.h"
#include "thread_pool.h"

#define INLINE static inline __attribute__((always_inline))

// Defines a function `LEVEL_name` of the library. `LEVEL` is the name of the level.
#define CONCATENATE(a, b) a##b
#define SYMBOL(prefix, name) CONCATENATE(prefix, name)
#define EXPORT(type, name) extern "C" __attribute__((visibility("default"))) type SYMBOL(LEVEL, name)
