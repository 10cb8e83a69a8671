// What spline kernels are measured against: the usual way, in which a pixel adds up its five local basis
// functions.  Only benchmarks call it.
#pragma once

namespace gnc {

// The centred quartic B-spline and its derivative.
inline void quartic(float x, float& value, float& slope) {
    const float a = x < 0.0f ? -x : x, sign = x < 0.0f ? -1.0f : 1.0f;
    if (a < 0.5f) {
        const float a2 = a * a;
        value = 115.0f / 192.0f + a2 * (a2 * 0.25f - 0.625f);
        slope = sign * a * (a2 - 1.25f);
    } else if (a < 1.5f) {
        const float b = 1.5f - a;
        value = (1.0f + b * (4.0f + b * (6.0f + b * (4.0f - 4.0f * b)))) / 24.0f;
        slope = -sign * (1.0f + b * (3.0f + b * (3.0f - 4.0f * b))) / 6.0f;
    } else if (a < 2.5f) {
        const float b = 2.5f - a, b3 = b * b * b;
        value = b3 * b / 24.0f;
        slope = -sign * b3 / 6.0f;
    } else {
        value = slope = 0.0f;
    }
}

}  // namespace gnc

// φ and φ' from the knots' coefficients (image, channel, knots + 4); beyond the grid they fall to zero.
GNC_API void gnc_local_bases(const float* x, const float* coefficients, const float* inverse_gamma,
                             i64 images, i64 channels, i64 pixels, int knots, float* value, float* slope,
                             int threads) {
    using namespace gnc;
    const i64 piece = 1 << 16, pieces = ceil_div(pixels, piece);
    parallel_for(images * channels * pieces, threads, [&](i64 task) {
        const i64 map = task / pieces, first = (task % pieces) * piece;
        const i64 n = std::min(piece, pixels - first), offset = map * pixels + first;
        const float* c = coefficients + map * (knots + 4);
        const float gain = inverse_gamma[map], last = static_cast<float>(knots - 1);
        for (i64 i = offset; i < offset + n; ++i) {
            const float z = x[i] * gain + 0.5f * last;
            const float inside = z > 0.0f ? (z < last ? z : last) : 0.0f;
            const int nearest = static_cast<int>(inside + 0.5f);
            float p = 0.0f, d = 0.0f;
            for (int m = -2; m <= 2; ++m) {  // weight 2 + k belongs to knot k
                float basis, derivative;
                quartic(z - static_cast<float>(nearest + m), basis, derivative);
                p += c[nearest + m + 2] * basis;
                d += c[nearest + m + 2] * derivative;
            }
            value[i] = p;
            slope[i] = d * gain;
        }
    });
}
