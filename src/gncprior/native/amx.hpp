// Products of whole tiles of bfloat16 (AMX), for the build that has them (included by turned.hpp,
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

template <>
struct Rows<Tiled> : Rows<Half> {};

// A group of 16 inputs and one tap: rows of the input, shifted by the tap, times GROUPS · 16 turned responses.
template <int GROUPS>
inline void multiply_rows(const Planes& in, i64 i, i64 ky, i64 kx, const Turned& responses, i64 o, float* totals) {
    const i64 apart = 4 * responses.outputs;
    _tile_loadd(0, totals, apart);
    if (GROUPS > 1) _tile_loadd(1, totals + 16, apart);
    if (GROUPS > 2) _tile_loadd(2, totals + 32, apart);
    for (i64 y = 0; y < responses.rows; ++y)
        for (i64 slot = 0; slot < responses.slots; slot += 16) {
            const auto* row = reinterpret_cast<const std::uint16_t*>(in.at(i, y + ky)) + 2 * slot + kx;
            const float* r = responses.data + y * responses.row() + slot * responses.outputs + o;
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

template <>
inline void multiply_tile<Tiled>(const Planes& in, i64 inputs, Kernel k, const Turned& responses,
                                 const Totals& totals) {
    const TilesInUse registers(16);
    for (i64 tap = 0; tap < k.size(); ++tap)
        for (i64 i = 0; i < inputs; i += 16) {
            const i64 ky = tap / k.width, kx = tap % k.width;
            i64 o = 0;
            for (; o + 48 <= totals.outputs; o += 48)
                multiply_rows<3>(in, i, ky, kx, responses, o, totals.at(tap, i, o));
            for (; o < totals.outputs; o += 16)
                multiply_rows<1>(in, i, ky, kx, responses, o, totals.at(tap, i, o));
        }
}
