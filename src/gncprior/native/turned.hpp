// Weight gradients on AVX-512 (included by convolutions.hpp, inside namespace gnc).
//
// dw[o,i,k] = Σ_p r_o[p] x̃_i[p + k − c] is a product of two matrices, one with a row for every (i, k) and one with a
// column for every o.  Responses are turned, so that the outputs of a slot, which is a pixel with Full and a pair of
// neighbours with Half, stand next to each other; inputs stay as they are, in rows of floats or of bfloat16.

// 16 rows of 16 slots, `stride` slots apart, become columns `to_stride` apart.
inline void transpose_slots(const float* from, i64 stride, float* to, i64 to_stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    // a[4i + j] holds columns j, j + 4, j + 8, j + 12 of rows 4i … 4i + 3, one to a quarter
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        b[j] = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);
        b[4 + j] = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
        b[8 + j] = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
        b[12 + j] = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88));
        _mm512_storeu_ps(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd));
        _mm512_storeu_ps(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88));
        _mm512_storeu_ps(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd));
    }
}

// Pixels as a product wants them: `PIXELS` of type `Pixel` are a slot.
template <class Product>
struct Rows {
    using Pixel = float;
    static constexpr i64 PIXELS = 1;
    static void shorten(const Planes&, i64) {}
};

#if defined(__AVX512BF16__)
template <>
struct Rows<Half> {
    using Pixel = std::uint16_t;
    static constexpr i64 PIXELS = 2;
    // Rows of floats become rows of bfloat16, followed by zeros.
    static void shorten(const Planes& in, i64 channels) {
        for (float* row = in.data; row < in.data + channels * in.plane; row += in.stride) {
            auto* to = reinterpret_cast<std::uint16_t*>(row);
            for (i64 j = 0; j < in.stride; j += LANES)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j),
                                    reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(row + j))));
            std::memset(to + in.stride, 0, sizeof(std::uint16_t) * in.stride);
        }
    }
};
#endif

// totals [tap][input][output] += what a tile gives; inputs and outputs are padded to 16.
struct Totals {
    float* data;
    i64 inputs, outputs;
    float* at(i64 tap, i64 input, i64 output) const { return data + (tap * inputs + input) * outputs + output; }
};

// Responses [row][slot][output], the slots of a row padded to 16 and the outputs to those of the totals.
struct Turned {
    const float* data;
    i64 rows, slots, outputs;
    i64 row() const { return round_up(slots, 16) * outputs; }
};

// V vectors of outputs and KY × KX taps of one input, summed in registers.
template <class Product, int V, int KY, int KX>
inline void multiply_taps(const Planes& in, i64 i, i64 ky, i64 kx, i64 kernel_width, const Turned& responses, i64 o,
                          const Totals& totals) {
    using Pixel = typename Rows<Product>::Pixel;
    vec sum[KY * KX][V];
    auto each = [&](auto&& what) {
#pragma GCC unroll 16
        for (int k = 0; k < KY * KX; ++k)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                what(sum[k][v], totals.at((ky + k / KX) * kernel_width + kx + k % KX, i, o + v * LANES));
    };
    each([](vec& s, const float* total) { s = load(total); });
    for (i64 y = 0; y < responses.rows; ++y) {
        const float* r = responses.data + y * responses.row() + o;
        const Pixel* pixels[KY];
        for (int k = 0; k < KY; ++k) pixels[k] = reinterpret_cast<const Pixel*>(in.at(i, y + ky + k)) + kx;
        for (i64 slot = 0; slot < responses.slots; ++slot, r += responses.outputs) {
            vec response[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) response[v] = load(r + v * LANES);
#pragma GCC unroll 16
            for (int k = 0; k < KY * KX; ++k) {
                const Pixel* first = pixels[k / KX] + Rows<Product>::PIXELS * slot + k % KX;
                const vec pixel = Product::spread(reinterpret_cast<const float*>(first));
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sum[k][v] = Product::add(sum[k][v], pixel, response[v]);
            }
        }
    }
    each([](const vec& s, float* total) { store(total, s); });
}

template <class Product, int V>
inline void multiply_all_taps(const Planes& in, i64 i, Kernel k, const Turned& responses, i64 o, const Totals& totals) {
    if (k.height == 3 && k.width == 3) {
        multiply_taps<Product, V, 3, 3>(in, i, 0, 0, 3, responses, o, totals);
        return;
    }
    for (i64 ky = 0; ky < k.height; ++ky) {
        i64 kx = 0;
        auto sweep = [&](auto taps) {
            constexpr int K = decltype(taps)::value;
            for (; kx + K <= k.width; kx += K)
                multiply_taps<Product, V, 1, K>(in, i, ky, kx, k.width, responses, o, totals);
        };
        sweep(std::integral_constant<int, 7>{});
        sweep(std::integral_constant<int, 5>{});
        sweep(std::integral_constant<int, 3>{});
        sweep(std::integral_constant<int, 1>{});
    }
}

// A few rows at a time, whose responses stay in the first-level cache while the inputs go by.
template <class Product>
inline void multiply_tile(const Planes& in, i64 inputs, Kernel k, const Turned& responses, const Totals& totals) {
    constexpr i64 ROWS = 2 * Rows<Product>::PIXELS;
    for (i64 y = 0; y < responses.rows; y += ROWS) {
        const Planes below{in.data + y * in.stride, in.stride, in.plane};
        const Turned some{responses.data + y * responses.row(), std::min(ROWS, responses.rows - y),
                          responses.slots, responses.outputs};
        for (i64 i = 0; i < inputs; ++i) {
            i64 o = 0;
            for (; o + 48 <= totals.outputs; o += 48) multiply_all_taps<Product, 3>(below, i, k, some, o, totals);
            for (; o < totals.outputs; o += 16) multiply_all_taps<Product, 1>(below, i, k, some, o, totals);
        }
    }
}

#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

// As weight_grad.  A task is a share of the tiles of all images that does not depend on the threads.
template <class Product>
inline void turned_weight_grad(const float* x, const float* r, i64 images, i64 inputs, i64 outputs, Shape shape,
                               Kernel k, float* dw, int threads) {
    constexpr i64 PIXELS = Rows<Product>::PIXELS, CHUNK = 16 * PIXELS;
    const Tiling tiles(shape, tile_side(16, k.height), tile_side(96, k.width));
    const i64 all = images * tiles.count(), tasks = std::min<i64>(all, 8);
    const i64 m = round_up(inputs, 16), n = round_up(outputs, 16), size = k.size() * m * n;
    thread_local Scratch sums_memory;
    float* sums = sums_memory.get(tasks * size);
    std::fill(sums, sums + tasks * size, 0.0f);
    parallel_for(tasks, threads, [&](i64 task) {
        thread_local Scratch in_memory, response_memory, turned_memory;
        for (i64 index = task * all / tasks; index < (task + 1) * all / tasks; ++index) {
            const i64 image = index / tiles.count();
            const Box tile = tiles[index % tiles.count()];
            const Box halo = pixels_of(tile, k);
            const i64 rows = tile.rows(), columns = round_up(tile.columns(), CHUNK);
            // whole chunks are read, and 16 channels, of which some may be zero
            Planes in = planes(nullptr, halo.rows(), columns, k.width - 1);
            in.data = in_memory.get(in.plane * m);
            copy_box(x + image * inputs * shape.pixels(), shape, inputs, halo, Boundary::symmetric, in);
            std::fill(in.at(inputs, 0), in.at(m, 0), 0.0f);
            Rows<Product>::shorten(in, m);
            Planes response = planes(nullptr, rows, columns, 0);
            response.data = response_memory.get(response.plane * n);
            copy_box(r + image * outputs * shape.pixels(), shape, outputs, tile, Boundary::zero, response);
            std::fill(response.at(outputs, 0), response.at(n, 0), 0.0f);
            Rows<Product>::shorten(response, n);
            float* to = turned_memory.get(rows * columns / PIXELS * n);
            const Turned turned{to, rows, ceil_div(tile.columns(), PIXELS), n};
            for (i64 y = 0; y < rows; ++y)
                for (i64 s = 0; s < columns / PIXELS; s += 16)
                    for (i64 o = 0; o < n; o += 16)
                        transpose_slots(response.at(o, y) + s, response.plane, to + y * turned.row() + s * n + o, n);
            multiply_tile<Product>(in, inputs, k, turned, Totals{sums + task * size, m, n});
        }
    });
    for (i64 o = 0; o < outputs; ++o)
        for (i64 i = 0; i < inputs; ++i)
            for (i64 tap = 0; tap < k.size(); ++tap) {
                float total = 0;
                for (i64 task = 0; task < tasks; ++task) total += *Totals{sums + task * size, m, n}.at(tap, i, o);
                dw[(o * inputs + i) * k.size() + tap] = total;
            }
}

template <class Product>
constexpr auto weight_grad = turned_weight_grad<Product>;
