// Products of whole tiles of bfloat16 (AMX), for the build that has them (included by convolutions.hpp,
// inside namespace gnc).
//
// A tile register holds 16 rows of 64 bytes.  One instruction adds to a tile C of 16 × 16 floats the
// product of A, 16 rows of up to 16 slots, and B, as many rows of 16 slots, a slot being a pair of bfloat16:
//
//   C[m][n] += Σ_s A[m][s].first B[s][n].first + A[m][s].second B[s][n].second.
//
// That is 8192 products in 16 cycles, where a vector of Half does 32 in one.  In a convolution A holds filters,
// B the planes of joined channels as Half has them, a row a plane; in its weight gradient A holds rows
// of the input, B the responses, pixels and channels having changed places.

// Registers 0 to 3 hold sums, 4 holds A and 5 holds B.  (The compiler wants them as plain numbers.)
constexpr int SUMS = 4, A = 4, B = 5;

struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// Tiles shaped for sums over `slots` slots, for as long as this lives.
class TilesInUse {
  public:
    explicit TilesInUse(int slots) {
        TileShapes shapes;
        for (int i = 0; i <= B; ++i) shapes.bytes[i] = 64, shapes.rows[i] = 16;
        shapes.bytes[A] = static_cast<std::uint16_t>(4 * slots);
        shapes.rows[B] = static_cast<std::uint8_t>(slots);
        _tile_loadconfig(&shapes);
    }
    ~TilesInUse() { _tile_release(); }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};

struct Tiled : Half {
    static constexpr int GROUP = 16;
};

// Weights [group][tap][part][output][slot], the slots of all inputs being cut into equal parts of 16 or less.
template <>
class PackedFilters<Tiled> {
  public:
    template <class F>
    PackedFilters(i64 outputs, i64 inputs, Kernel kernel, F weight)
        : kernel(kernel), inputs(ceil_div(inputs, 2)), groups(ceil_div(outputs, Tiled::GROUP)),
          w_(static_cast<std::size_t>(groups * kernel.size() * parts() * Tiled::GROUP * slots())) {
        float* p = w_.data();
        auto known = [&](i64 o, i64 i, i64 k) {
            return o < outputs && i < inputs ? weight(o, i, k) : 0.0f;
        };
        for (i64 g = 0; g < groups; ++g)
            for (i64 k = 0; k < kernel.size(); ++k)
                for (i64 part = 0; part < parts(); ++part)
                    for (i64 o = g * Tiled::GROUP; o < (g + 1) * Tiled::GROUP; ++o)
                        for (i64 s = part * slots(); s < (part + 1) * slots(); ++s)
                            *p++ = Half::slot(known(o, 2 * s, k), known(o, 2 * s + 1, k));
    }
    i64 parts() const { return ceil_div(inputs, 16); }
    i64 slots() const { return ceil_div(inputs, parts()); }
    const float* group(i64 g) const {
        return w_.data() + g * kernel.size() * parts() * Tiled::GROUP * slots();
    }
    const Kernel kernel;
    const i64 inputs, groups;  // inputs counts slots

  private:
    std::vector<float> w_;
};

// 16 outputs of V vectors of pixels.
template <int V>
inline void multiply_strip(const Planes& in, i64 y, i64 x, i64 parts, i64 slots, Kernel kernel, const float* w,
                           const Planes& out) {
    _tile_zero(0);
    if (V > 1) _tile_zero(1);
    if (V > 2) _tile_zero(2);
    if (V > 3) _tile_zero(3);
    const i64 apart = 4 * in.plane;
    for (i64 ky = 0; ky < kernel.height; ++ky)
        for (i64 kx = 0; kx < kernel.width; ++kx)
            for (i64 part = 0; part < parts; ++part, w += Tiled::GROUP * slots) {
                const float* row = in.at(part * slots, y + ky) + x + kx;
                _tile_loadd(4, w, 4 * slots);
                _tile_loadd(5, row, apart);
                _tile_dpbf16ps(0, 4, 5);
                if (V > 1) {
                    _tile_loadd(5, row + LANES, apart);
                    _tile_dpbf16ps(1, 4, 5);
                }
                if (V > 2) {
                    _tile_loadd(5, row + 2 * LANES, apart);
                    _tile_dpbf16ps(2, 4, 5);
                }
                if (V > 3) {
                    _tile_loadd(5, row + 3 * LANES, apart);
                    _tile_dpbf16ps(3, 4, 5);
                }
            }
    float* to = out.at(0, y) + x;
    _tile_stored(0, to, 4 * out.plane);
    if (V > 1) _tile_stored(1, to + LANES, 4 * out.plane);
    if (V > 2) _tile_stored(2, to + 2 * LANES, 4 * out.plane);
    if (V > 3) _tile_stored(3, to + 3 * LANES, 4 * out.plane);
}

template <>
inline void correlate<Tiled>(const Planes& in, i64 inputs, Kernel kernel, const float* w, i64 rows, i64 columns,
                             const Planes& out) {
    const i64 parts = ceil_div(inputs, 16), slots = ceil_div(inputs, parts);
    const i64 vectors = ceil_div(columns, LANES), strips = ceil_div(vectors, SUMS);
    // where the last part is not full, its weights are zero, and so must be what they meet
    std::fill(in.at(inputs, 0), in.at(parts * slots, 0), 0.0f);
    const TilesInUse tiles(static_cast<int>(slots));
    for (i64 y = 0; y < rows; ++y)
        for (i64 s = 0; s < strips; ++s) {
            const i64 first = s * vectors / strips, n = (s + 1) * vectors / strips - first;
            const i64 x = first * LANES;
            if (n == 1) multiply_strip<1>(in, y, x, parts, slots, kernel, w, out);
            else if (n == 2) multiply_strip<2>(in, y, x, parts, slots, kernel, w, out);
            else if (n == 3) multiply_strip<3>(in, y, x, parts, slots, kernel, w, out);
            else multiply_strip<4>(in, y, x, parts, slots, kernel, w, out);
        }
}

// ---------------------------------------------------------------- weight gradient

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

// dw of a group of inputs and one tap, over the pixels of a tile, added to totals [16 inputs][16 · groups outputs]:
// rows of the input, shifted by the tap, times responses [row][pair of pixels][output].
template <int GROUPS>
inline void multiply_rows(const Planes& in, i64 i, i64 ky, i64 kx, const float* responses, i64 stride, i64 rows,
                          i64 chunks, float* totals) {
    const i64 apart = 4 * stride, pairs = chunks * 16;
    _tile_loadd(0, totals, apart);
    if (GROUPS > 1) _tile_loadd(1, totals + 16, apart);
    if (GROUPS > 2) _tile_loadd(2, totals + 32, apart);
    for (i64 y = 0; y < rows; ++y)
        for (i64 c = 0; c < chunks; ++c) {
            const auto* row = reinterpret_cast<const std::uint16_t*>(in.at(i, y + ky)) + c * 32 + kx;
            const float* r = responses + (y * pairs + c * 16) * stride;
            _tile_loadd(4, row, 4 * in.plane);
            _tile_loadd(5, r, apart);
            _tile_dpbf16ps(0, 4, 5);
            if (GROUPS > 1) {
                _tile_loadd(5, r + 16, apart);
                _tile_dpbf16ps(1, 4, 5);
            }
            if (GROUPS > 2) {
                _tile_loadd(5, r + 32, apart);
                _tile_dpbf16ps(2, 4, 5);
            }
        }
    _tile_stored(0, totals, apart);
    if (GROUPS > 1) _tile_stored(1, totals + 16, apart);
    if (GROUPS > 2) _tile_stored(2, totals + 32, apart);
}

// As weight_grad of the other products.  A task is a share of the images that does not depend on the threads.
template <>
inline void weight_grad<Tiled>(const float* x, const float* r, i64 images, i64 inputs, i64 outputs, Shape shape,
                               Kernel k, float* dw, int threads) {
    const i64 m = round_up(inputs, 16), n = round_up(outputs, 16), tasks = std::min<i64>(images, 8);
    const i64 size = k.size() * m * n;  // [tap][input][output]
    thread_local Scratch sums_memory;
    float* sums = sums_memory.get(tasks * size);
    std::fill(sums, sums + tasks * size, 0.0f);
    const Tiling tiles(shape, tile_side(16, k.height), tile_side(64, k.width));
    parallel_for(tasks, threads, [&](i64 task) {
        thread_local Scratch in_memory, response_memory, turned_memory;
        float* totals = sums + task * size;
        for (i64 image = task * images / tasks; image < (task + 1) * images / tasks; ++image)
            for (i64 index = 0; index < tiles.count(); ++index) {
                const Box tile = tiles[index];
                const Box halo = pixels_of(tile, k);
                const i64 rows = tile.rows(), chunks = ceil_div(tile.columns(), 32), pairs = chunks * 16;
                // whole tiles are read: rows of 32 pixels, and 16 channels, of which some may be zero
                Planes in = planes(nullptr, halo.rows(), chunks * 32, k.width - 1);
                in.data = in_memory.get(in.plane * m);
                copy_box(x + image * inputs * shape.pixels(), shape, inputs, halo, Boundary::symmetric, in);
                std::fill(in.at(inputs, 0), in.at(m, 0), 0.0f);
                Half::shorten_rows(in, m);
                Planes response = planes(nullptr, rows, chunks * 32, 0);
                response.data = response_memory.get(response.plane * n);
                copy_box(r + image * outputs * shape.pixels(), shape, outputs, tile, Boundary::zero, response);
                std::fill(response.at(outputs, 0), response.at(n, 0), 0.0f);
                Half::shorten_rows(response, n);
                float* turned = turned_memory.get(rows * pairs * n);
                for (i64 y = 0; y < rows; ++y)
                    for (i64 p = 0; p < pairs; p += 16)
                        for (i64 o = 0; o < n; o += 16)
                            transpose_slots(response.at(o, y) + p, response.plane,
                                            turned + (y * pairs + p) * n + o, n);
                const TilesInUse registers(16);
                for (i64 tap = 0; tap < k.size(); ++tap)
                    for (i64 i = 0; i < m; i += 16) {
                        const i64 ky = tap / k.width, kx = tap % k.width;
                        float* to = totals + (tap * m + i) * n;
                        i64 o = 0;
                        for (; o + 48 <= n; o += 48)
                            multiply_rows<3>(in, i, ky, kx, turned + o, n, rows, chunks, to + o);
                        for (; o < n; o += 16)
                            multiply_rows<1>(in, i, ky, kx, turned + o, n, rows, chunks, to + o);
                    }
            }
    });
    for (i64 o = 0; o < outputs; ++o)
        for (i64 i = 0; i < inputs; ++i)
            for (i64 tap = 0; tap < k.size(); ++tap) {
                float total = 0;
                for (i64 task = 0; task < tasks; ++task)
                    total += sums[task * size + (tap * m + i) * n + o];
                dw[(o * inputs + i) * k.size() + tap] = total;
            }
}
