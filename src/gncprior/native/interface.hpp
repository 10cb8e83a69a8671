// The C interface.  Arrays are dense float32 in row-major order: images (image, channel, row, column),
// weights (output, input, row, column), tables (image, channel, coefficient, row).  Python checks
// shapes, types and pointers; nothing is checked here.
#pragma once

#define GNC_API extern "C" __attribute__((visibility("default")))

using gnc::i64;

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether there are tiles of bfloat16, and the system lets this process have them: they are to be asked for.
inline bool may_use_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
inline bool may_use_tiles() { return false; }
#endif

// Which builds this processor can run: bit 0 portable, bit 1 AVX2, bit 2 AVX-512, bit 3 with bfloat16, bit 4
// with tiles of it.
GNC_API int gnc_supported() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    return 1 | avx2 << 1 | avx512 << 2 | bf16 << 3 | (bf16 && may_use_tiles()) << 4;
#else
    return 1;
#endif
}

// φ, φ', φ'' of every pixel (those whose pointer is not null), each channel with its own table.
GNC_API void gnc_evaluate(const float* x, const float* tables, const float* inverse_gamma, i64 images,
                          i64 channels, i64 pixels, int channels_last, int knots, float* value,
                          float* slope, float* curvature, int threads) {
    using namespace gnc;
    const Experts phi{tables, inverse_gamma, knots, channels};
    const Outputs out{value, slope, curvature};
    if (!channels_last) {
        const i64 piece = 1 << 16, pieces = ceil_div(pixels, piece);
        // beyond the size of the last-level cache, writing past the caches saves reading the target
        auto aligned = [](const float* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; };
        const bool stream = images * channels * pixels > (i64{1} << 23) && pixels % 16 == 0 &&
                            aligned(value) && aligned(slope) && aligned(curvature);
        parallel_for(images * channels * pieces, threads, [&](i64 task) {
            const i64 map = task / pieces, first = (task % pieces) * piece;
            const i64 offset = map * pixels + first;
            evaluate(phi(map / channels, map % channels), x + offset, std::min(piece, pixels - first),
                     out.at(offset), stream);
        });
        return;
    }
    const i64 piece = 128, pieces = ceil_div(pixels, piece);
    parallel_for(images * pieces, threads, [&](i64 task) {  // a block of pixels turns round in cache
        const i64 image = task / pieces, first = (task % pieces) * piece;
        const i64 n = std::min(piece, pixels - first);
        const float* block = x + (image * pixels + first) * channels;
        const Outputs to = out.at((image * pixels + first) * channels);
        alignas(64) float u[piece], p[piece], d[piece], dd[piece];
        for (i64 c = 0; c < channels; ++c) {
            for (i64 i = 0; i < n; ++i) u[i] = block[i * channels + c];
            evaluate(phi(image, c), u, n,
                     {to.value ? p : nullptr, to.slope ? d : nullptr, to.curvature ? dd : nullptr});
            for (i64 i = 0; to.value && i < n; ++i) to.value[i * channels + c] = p[i];
            for (i64 i = 0; to.slope && i < n; ++i) to.slope[i * channels + c] = d[i];
            for (i64 i = 0; to.curvature && i < n; ++i) to.curvature[i * channels + c] = dd[i];
        }
    });
}

// moments (image, channel, coefficient, row) = Σ g s^k: the transpose of gnc_evaluate in its tables.
// A null g counts as ones: the soft histogram.
GNC_API void gnc_scatter(const float* x, const float* g, const float* inverse_gamma, i64 images,
                         i64 channels, i64 pixels, int channels_last, int knots, double* moments,
                         int threads) {
    using namespace gnc;
    const i64 piece = 4096, rows = knots + 2;
    parallel_for(images * channels, threads, [&](i64 map) {
        const Table table{nullptr, knots, inverse_gamma[map]};
        Moments sums(static_cast<int>(rows));
        double* out = moments + map * ORDER * rows;
        std::fill(out, out + ORDER * rows, 0.0);
        const i64 image = map / channels, channel = map % channels;
        float u[256], weight[256];
        for (i64 first = 0; first < pixels; first += piece) {
            const i64 n = std::min(piece, pixels - first);
            if (!channels_last) {
                const i64 offset = map * pixels + first;
                sums.add(table, x + offset, g ? g + offset : nullptr, n);
            } else {
                for (i64 i = 0; i < n; i += 256) {
                    const i64 m = std::min<i64>(256, n - i);
                    for (i64 l = 0; l < m; ++l) {
                        const i64 at = (image * pixels + first + i + l) * channels + channel;
                        u[l] = x[at];
                        weight[l] = g ? g[at] : 1.0f;
                    }
                    sums.add(table, u, weight, m);
                }
            }
            sums.flush(out);
        }
    });
}

// The three convolutions; with `half` their products are of bfloat16 where this build has them.
GNC_API void gnc_convolve(const float* x, const float* w, i64 images, i64 inputs, i64 outputs, i64 height,
                          i64 width, i64 kernel_height, i64 kernel_width, float* out, int half,
                          int threads) {
    using namespace gnc;
    (half ? convolve<Short> : convolve<Full>)(x, w, images, inputs, outputs, {height, width},
                                             {kernel_height, kernel_width}, out, threads);
}

GNC_API void gnc_convolve_transpose(const float* r, const float* w, i64 images, i64 inputs, i64 outputs,
                                    i64 height, i64 width, i64 kernel_height, i64 kernel_width, float* out,
                                    int half, int threads) {
    using namespace gnc;
    (half ? convolve_transpose<Short> : convolve_transpose<Full>)(
        r, w, images, inputs, outputs, {height, width}, {kernel_height, kernel_width}, out, threads);
}

GNC_API void gnc_weight_grad(const float* x, const float* r, i64 images, i64 inputs, i64 outputs,
                             i64 height, i64 width, i64 kernel_height, i64 kernel_width, float* dw,
                             int half, int threads) {
    using namespace gnc;
    (half ? weight_grad<Short> : weight_grad<Full>)(x, r, images, inputs, outputs, {height, width},
                                                   {kernel_height, kernel_width}, dw, threads);
}

// grad (may be null) = Kᵀ φ'(K x); sums (n_sums, images) of the families of tables in sum_tables
// (n_sums, image, filter, coefficient, row).
GNC_API void gnc_first_layer(const float* x, const float* w, const float* tables, const float* sum_tables,
                             const float* inverse_gamma, i64 images, i64 channels, i64 filters, i64 height,
                             i64 width, i64 kernel_height, i64 kernel_width, int knots, int n_sums,
                             float* grad, double* sums, int threads) {
    using namespace gnc;
    const i64 family = images * filters * ORDER * (knots + 2);
    std::vector<Experts> psi;
    for (int s = 0; s < n_sums; ++s) psi.push_back({sum_tables + s * family, inverse_gamma, knots, filters});
    first_layer(x, w, images, channels, filters, {height, width}, {kernel_height, kernel_width},
                {tables, inverse_gamma, knots, filters}, psi.data(), n_sums, grad, sums, threads);
}

// Tables (image, channel, coefficient, row) from weights (channel, times, knots + 4): of φ of all images
// and of its derivatives in t̂ of the first `part`.  beta (3, image, 5) belongs to the weights from `first`
// (image) on.
GNC_API void gnc_expand(const float* weights, const std::int64_t* first, const float* beta, i64 images,
                        i64 part, i64 channels, i64 times, int knots, float* value, float* rate,
                        float* second, int threads) {
    float* const tables[3] = {value, rate, second};
    gnc::expand({first, beta, images, channels, times, knots}, weights, part, tables, threads);
}

// The transpose: the gradient in the weights from those in the tables.
GNC_API void gnc_contract(const float* tables, const std::int64_t* first, const float* beta, i64 images,
                          i64 part, i64 channels, i64 times, int knots, const double* value,
                          const double* rate, const double* second, float* weights, int threads) {
    const double* const grads[3] = {value, rate, second};
    gnc::contract({first, beta, images, channels, times, knots}, grads, part, tables, weights, threads);
}

// The passes of training over the features of a layer; see training.hpp.
GNC_API void gnc_rates(const float* u, const float* kz, const float* u_dot, const float* tables,
                       const float* rate_tables, const float* mixed_tables, const float* inverse_gamma,
                       i64 images, i64 part, i64 channels, i64 pixels, int knots, float w, float* z,
                       float* h_dot, int threads) {
    using gnc::Experts;
    const Experts phi{tables, inverse_gamma, knots, channels};
    const Experts phi_t{rate_tables, inverse_gamma, knots, channels};
    const Experts mixed{mixed_tables, inverse_gamma, knots, channels};
    gnc::rates({u, kz, u_dot, phi, phi_t, mixed, w, images, part, pixels}, z, h_dot, threads);
}

GNC_API void gnc_adjoints(const float* u, const float* kz, const float* u_dot, const float* tables,
                          const float* rate_tables, const float* mixed_tables, const float* inverse_gamma,
                          i64 images, i64 part, i64 channels, i64 pixels, int knots, float w,
                          const float* outer_a, const float* outer_p, const float* outer_q, float* p,
                          float* q, double* grads, double* rate_grads, double* second, int threads) {
    using gnc::Experts;
    const Experts phi{tables, inverse_gamma, knots, channels};
    const Experts phi_t{rate_tables, inverse_gamma, knots, channels};
    const Experts mixed{mixed_tables, inverse_gamma, knots, channels};
    gnc::adjoints({u, kz, u_dot, phi, phi_t, mixed, w, images, part, pixels}, {outer_a, outer_p, outer_q},
                  p, q, grads, rate_grads, second, threads);
}

// The floor that spline kernels are measured against: reads once, writes twice.
GNC_API void gnc_read_once_write_twice(const float* x, i64 n, float* a, float* b, int threads) {
    using namespace gnc;
    const i64 piece = 1 << 16;
    parallel_for(ceil_div(n, piece), threads, [&](i64 task) {
        const i64 first = task * piece, last = std::min(first + piece, n);
        i64 i = first;
        for (; i + LANES <= last; i += LANES) {
            const vec v = load(x + i);
#if defined(__AVX512F__)
            if (n > (i64{1} << 23)) {
                _mm512_stream_ps(a + i, v + v);
                _mm512_stream_ps(b + i, v * v);
                continue;
            }
#endif
            store(a + i, v + v);
            store(b + i, v * v);
        }
        for (; i < last; ++i) a[i] = x[i] + x[i], b[i] = x[i] * x[i];
    });
}
