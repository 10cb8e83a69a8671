// The native core of gncprior: splines, convolutions and the fused first layer, float32 on CPUs.
//
// One source, several builds: kernels_amx.cpp to kernels_portable.cpp include this file and are compiled
// with the flags of their instruction set.  Python picks one of the libraries at run time.  The interface at
// the end of the file is plain C; nothing here knows torch.
//
// Two promises hold for every function: the result does not depend on the number of threads, bit for
// bit (work is cut into the same tasks whatever the number of threads, and no two tasks add to the
// same number), and scratch memory is of the size of a tile, never of 48 channels of an image.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "threads.hpp"

namespace gnc {

using i64 = std::int64_t;

// ---------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline vec load(const float* p) { return *reinterpret_cast<const loose_vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose_vec*>(p) = v; }
inline vec splat(float a) { return a - vec{}; }
inline float sum(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float s = 0;
    for (int i = 0; i < LANES; ++i) s += v[i];
    return s;
#endif
}

inline i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
inline i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }

// A buffer that a thread keeps and only ever enlarges: no allocation in the loops.
class Scratch {
  public:
    float* get(i64 size) {
        if (static_cast<i64>(memory_.size()) < size + 16) memory_.resize(size + 16);
        auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
        return reinterpret_cast<float*>((address + 63) & ~std::uintptr_t{63});
    }

  private:
    std::vector<float> memory_;
};

#include "splines.hpp"

#include "convolutions.hpp"

#include "training.hpp"

}  // namespace gnc

#include "interface.hpp"

#include "baseline.hpp"
