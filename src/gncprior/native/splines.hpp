// Piecewise quartic functions given by tables (included by kernels.hpp, inside namespace gnc).
//
// A table of a function with N knots has N + 2 rows of 5 coefficients, stored coefficient by
// coefficient: a[k][row].  Row 1 + i serves z ∈ [i − ½, i + ½], row 0 all z < 0 and row N + 1 all
// z > N − 1, where z = x/γ + (N − 1)/2.  The value is Σ_k a_k s^k with s = z − clamp(round z).

// The innermost parts are inlined and the loops around them are not, wherever they are called from: in a
// large source the compiler would else choose, and with it how products and sums are rounded.
#define ALWAYS_INLINE __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))

constexpr int ORDER = 5;
constexpr int REGISTER_ROWS = 64;  // rows that the AVX-512 look-up keeps in registers

struct Table {
    const float* a;  // ORDER × rows; null where only `place` is needed
    int knots;
    float inverse_gamma;
#if defined(__AVX512F__)
    alignas(64) float padded[ORDER][REGISTER_ROWS] = {};  // what fits in registers, laid out once
#endif
    Table(const float* table, int n, float inverse) : a(table), knots(n), inverse_gamma(inverse) {
#if defined(__AVX512F__)
        for (int k = 0; a && k < ORDER; ++k)
            std::memcpy(padded[k], a + k * rows(), sizeof(float) * std::min(rows(), REGISTER_ROWS));
#endif
    }
    int rows() const { return knots + 2; }
};

// Where x falls: the row and the position in it.
struct Place {
    int row;
    float s;
};

inline Place place(const Table& t, float x) {
    const float last = static_cast<float>(t.knots - 1);
    const float z = x * t.inverse_gamma + 0.5f * last;
    const float inside = z > 0.0f ? (z < last ? z : last) : 0.0f;  // NaN goes to 0
    const int i = static_cast<int>(inside + 0.5f);
    const int knot = i < t.knots ? i : t.knots - 1;
    return {z < 0.0f ? 0 : (z > last ? t.knots + 1 : knot + 1), z - static_cast<float>(knot)};
}

// Value and the first two derivatives in s, by Horner's scheme carried on.
template <class V>
struct Jet {
    V p, d, dd;
    ALWAYS_INLINE Jet(V a0, V a1, V a2, V a3, V a4, V s) {
        p = a4;
        d = p;
        p = p * s + a3;
        dd = d;
        d = d * s + p;
        p = p * s + a2;
        dd = dd * s + d;
        d = d * s + p;
        p = p * s + a1;
        dd = dd * s + d;
        d = d * s + p;
        p = p * s + a0;
    }
};

// What is wanted of a spline: pointers to rows of φ, φ', φ''; null where not wanted.
struct Outputs {
    float* value;
    float* slope;
    float* curvature;
    Outputs at(i64 i) const {
        return {value ? value + i : value, slope ? slope + i : slope,
                curvature ? curvature + i : curvature};
    }
};

template <bool P, bool D, bool DD>
inline void evaluate_scalar(const Table& t, const float* x, i64 n, Outputs out) {
    const int rows = t.rows();
    for (i64 i = 0; i < n; ++i) {
        const Place at = place(t, x[i]);
        const float* a = t.a + at.row;
        const Jet<float> jet(a[0], a[rows], a[2 * rows], a[3 * rows], a[4 * rows], at.s);
        if (P) out.value[i] = jet.p;
        if (D) out.slope[i] = jet.d * t.inverse_gamma;
        if (DD) out.curvature[i] = 2.0f * jet.dd * t.inverse_gamma * t.inverse_gamma;
    }
}

#if defined(__AVX512F__)

// 64 rows of one coefficient in four registers; a look-up is two permutes and a blend.
struct RegisterColumn {
    __m512 a, b, c, d;
    ALWAYS_INLINE explicit RegisterColumn(const float* p)
        : a(_mm512_load_ps(p)), b(_mm512_load_ps(p + 16)), c(_mm512_load_ps(p + 32)),
          d(_mm512_load_ps(p + 48)) {}
    ALWAYS_INLINE __m512 operator()(__m512i row, __mmask16 high) const {
        return _mm512_mask_blend_ps(high, _mm512_permutex2var_ps(a, row, b),
                                    _mm512_permutex2var_ps(c, row, d));
    }
};

template <bool P, bool D, bool DD, bool STREAM>
NEVER_INLINE void evaluate_registers(const Table& t, const float* x, i64 n, Outputs out) {
    const RegisterColumn a0(t.padded[0]), a1(t.padded[1]), a2(t.padded[2]), a3(t.padded[3]),
        a4(t.padded[4]);
    const float* tail = t.a + t.knots + 1;
    const __m512 gain = _mm512_set1_ps(t.inverse_gamma);
    const __m512 gain2 = _mm512_set1_ps(2.0f * t.inverse_gamma * t.inverse_gamma);
    const __m512 last = _mm512_set1_ps(static_cast<float>(t.knots - 1));
    const __m512 middle = _mm512_set1_ps(0.5f * static_cast<float>(t.knots - 1));
    auto sixteen = [&](__m512 argument, __m512& value, __m512& slope,
                       __m512& curvature) ALWAYS_INLINE {
        const __m512 z = _mm512_fmadd_ps(argument, gain, middle);
        // max returns its second operand for NaN, so the row is always a legal one
        const __m512 inside = _mm512_min_ps(_mm512_max_ps(z, _mm512_setzero_ps()), last);
        const __m512i knot = _mm512_cvtps_epi32(inside);
        const __m512 s = _mm512_sub_ps(z, _mm512_cvtepi32_ps(knot));
        const __mmask16 not_below = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_NLT_UQ);
        const __mmask16 above = _mm512_cmp_ps_mask(z, last, _CMP_GT_OQ);
        const __m512i row = _mm512_maskz_add_epi32(not_below, knot, _mm512_set1_epi32(1));
        const __mmask16 high = _mm512_test_epi32_mask(row, _mm512_set1_epi32(32));
        __m512 c0 = _mm512_setzero_ps(), c1 = a1(row, high), c2 = a2(row, high);
        __m512 c3 = a3(row, high), c4 = a4(row, high);
        if (P) c0 = a0(row, high);
        if (__builtin_expect(above != 0, 0)) {  // the 65th row: one broadcast, seldom needed
            const int r = t.rows();
            c0 = _mm512_mask_mov_ps(c0, above, _mm512_set1_ps(tail[0]));
            c1 = _mm512_mask_mov_ps(c1, above, _mm512_set1_ps(tail[r]));
            c2 = _mm512_mask_mov_ps(c2, above, _mm512_set1_ps(tail[2 * r]));
            c3 = _mm512_mask_mov_ps(c3, above, _mm512_set1_ps(tail[3 * r]));
            c4 = _mm512_mask_mov_ps(c4, above, _mm512_set1_ps(tail[4 * r]));
        }
        const Jet<__m512> jet(c0, c1, c2, c3, c4, s);
        value = jet.p;
        slope = jet.d * gain;
        curvature = jet.dd * gain2;
    };
    __m512 p, d, dd;
    i64 i = 0;
    for (; i + 16 <= n; i += 16) {
        sixteen(_mm512_loadu_ps(x + i), p, d, dd);
        if (STREAM) {
            if (P) _mm512_stream_ps(out.value + i, p);
            if (D) _mm512_stream_ps(out.slope + i, d);
            if (DD) _mm512_stream_ps(out.curvature + i, dd);
        } else {
            if (P) _mm512_storeu_ps(out.value + i, p);
            if (D) _mm512_storeu_ps(out.slope + i, d);
            if (DD) _mm512_storeu_ps(out.curvature + i, dd);
        }
    }
    if (i < n) {
        const __mmask16 lanes = static_cast<__mmask16>((1u << (n - i)) - 1);
        sixteen(_mm512_maskz_loadu_ps(lanes, x + i), p, d, dd);
        if (P) _mm512_mask_storeu_ps(out.value + i, lanes, p);
        if (D) _mm512_mask_storeu_ps(out.slope + i, lanes, d);
        if (DD) _mm512_mask_storeu_ps(out.curvature + i, lanes, dd);
    }
}

#elif defined(__AVX2__)

template <bool P, bool D, bool DD>
NEVER_INLINE void evaluate_gather(const Table& t, const float* x, i64 n, Outputs out) {
    const __m256 gain = _mm256_set1_ps(t.inverse_gamma);
    const __m256 gain2 = _mm256_set1_ps(2.0f * t.inverse_gamma * t.inverse_gamma);
    const __m256 last = _mm256_set1_ps(static_cast<float>(t.knots - 1));
    const __m256 middle = _mm256_set1_ps(0.5f * static_cast<float>(t.knots - 1));
    const __m256 zero = _mm256_setzero_ps();
    const int rows = t.rows();
    i64 i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 z = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), gain, middle);
        const __m256 inside = _mm256_min_ps(_mm256_max_ps(z, zero), last);
        const __m256i knot = _mm256_cvtps_epi32(inside);
        const __m256 s = _mm256_sub_ps(z, _mm256_cvtepi32_ps(knot));
        // comparisons give −1 where true: below moves one row down, above one row up
        const __m256i below = _mm256_castps_si256(_mm256_cmp_ps(z, zero, _CMP_LT_OQ));
        const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(z, last, _CMP_GT_OQ));
        const __m256i row = _mm256_sub_epi32(
            _mm256_add_epi32(_mm256_add_epi32(knot, _mm256_set1_epi32(1)), below), above);
        const Jet<__m256> jet(P ? _mm256_i32gather_ps(t.a, row, 4) : zero,
                              _mm256_i32gather_ps(t.a + rows, row, 4),
                              _mm256_i32gather_ps(t.a + 2 * rows, row, 4),
                              _mm256_i32gather_ps(t.a + 3 * rows, row, 4),
                              _mm256_i32gather_ps(t.a + 4 * rows, row, 4), s);
        if (P) _mm256_storeu_ps(out.value + i, jet.p);
        if (D) _mm256_storeu_ps(out.slope + i, jet.d * gain);
        if (DD) _mm256_storeu_ps(out.curvature + i, jet.dd * gain2);
    }
    evaluate_scalar<P, D, DD>(t, x + i, n - i, out.at(i));
}

#endif

template <bool P, bool D, bool DD>
inline void evaluate_some(const Table& t, const float* x, i64 n, Outputs out, bool stream) {
#if defined(__AVX512F__)
    if (t.knots < REGISTER_ROWS) {
        stream ? evaluate_registers<P, D, DD, true>(t, x, n, out)
               : evaluate_registers<P, D, DD, false>(t, x, n, out);
        return;
    }
#elif defined(__AVX2__)
    evaluate_gather<P, D, DD>(t, x, n, out);
    return;
#endif
    (void)stream;
    evaluate_scalar<P, D, DD>(t, x, n, out);
}

// φ, φ', φ'' (those with a pointer) of n numbers.  `stream` writes past the caches; it needs outputs
// aligned to 64 bytes and n a multiple of 16.
inline void evaluate(const Table& t, const float* x, i64 n, Outputs out, bool stream = false) {
    const bool p = out.value, d = out.slope, dd = out.curvature;
    if (p && d && dd) evaluate_some<true, true, true>(t, x, n, out, stream);
    else if (p && d) evaluate_some<true, true, false>(t, x, n, out, stream);
    else if (p && dd) evaluate_some<true, false, true>(t, x, n, out, stream);
    else if (d && dd) evaluate_some<false, true, true>(t, x, n, out, stream);
    else if (p) evaluate_some<true, false, false>(t, x, n, out, stream);
    else if (d) evaluate_some<false, true, false>(t, x, n, out, stream);
    else if (dd) evaluate_some<false, false, true>(t, x, n, out, stream);
}

// Σ φ(x_i), in pieces short enough for a float sum.
inline double evaluate_sum(const Table& t, const float* x, i64 n) {
    alignas(64) float value[256];
    double total = 0;
    for (i64 i = 0; i < n; i += 256) {
        const i64 m = std::min<i64>(256, n - i);
        evaluate(t, x + i, m, {value, nullptr, nullptr});
        float part[8] = {};
        i64 k = 0;
        for (; k + 8 <= m; k += 8)
            for (int l = 0; l < 8; ++l) part[l] += value[k + l];
        for (; k < m; ++k) part[0] += value[k];
        for (int l = 0; l < 8; ++l) total += part[l];
    }
    return total;
}

// The moments Σ_i g_i s_i^k of every row: the transpose of `evaluate`.  A row's five sums lie in one
// 8-vector, so a number costs one load, add and store; four copies in turn keep neighbouring pixels,
// which often fall into the same row, from waiting for each other.
class Moments {
  public:
    explicit Moments(int rows) : rows_(rows), copies_(static_cast<std::size_t>(4 * rows)) {}

    NEVER_INLINE void add(const Table& t, const float* x, const float* g, i64 n) {
        i64 i = 0;
#if defined(__AVX2__)
        for (; i + 8 <= n; i += 8) add_powers(t, x + i, g ? g + i : nullptr);
#endif
        for (; i < n; ++i) {
            const Place at = place(t, x[i]);
            float power = g ? g[i] : 1.0f;
            float* sum = reinterpret_cast<float*>(&sum_of(at.row, static_cast<int>(i)));
            for (int k = 0; k < ORDER; ++k, power *= at.s) sum[k] += power;
        }
    }

    // Σ_i g_i s_i^k + b_i (s_i^k)' + c_i (s_i^k)'': what a table gets from weights g of the function, b of
    // its slope and c of its curvature, both derivatives in s; null counts as zero.
    NEVER_INLINE void add_jet(const Table& t, const float* x, const float* g, const float* b, const float* c, i64 n) {
        i64 i = 0;
#if defined(__AVX2__)
        for (; i + 8 <= n; i += 8) {
            const EightPlaces at(t, x + i);
            auto weight = [i](const float* p) { return p ? _mm256_loadu_ps(p + i) : _mm256_setzero_ps(); };
            const __m256 s = at.s, g0 = weight(g), b0 = weight(b);
            const __m256 c0 = 2.0f * weight(c), c1 = c0 * s, c2 = c1 * s;
            const __m256 b1 = b0 * s, b2 = b1 * s, b3 = b2 * s;
            const __m256 g1 = g0 * s, g2 = g1 * s, g3 = g2 * s, g4 = g3 * s;
            add_eight(at, g0, g1 + b0, g2 + 2.0f * b1 + c0, g3 + 3.0f * (b2 + c1),
                      g4 + 4.0f * b3 + 6.0f * c2);
        }
#endif
        for (; i < n; ++i) {
            const Place at = place(t, x[i]);
            const float s = at.s, s2 = s * s, s3 = s2 * s;
            const float g0 = g ? g[i] : 0.0f, b0 = b ? b[i] : 0.0f, c0 = c ? 2 * c[i] : 0.0f;
            float* sum = reinterpret_cast<float*>(&sum_of(at.row, static_cast<int>(i)));
            sum[0] += g0;
            sum[1] += g0 * s + b0;
            sum[2] += g0 * s2 + 2 * b0 * s + c0;
            sum[3] += g0 * s3 + 3 * (b0 * s2 + c0 * s);
            sum[4] += g0 * s2 * s2 + 4 * b0 * s3 + 6 * c0 * s2;
        }
    }

    // Adds what was gathered to out[k][row] and starts again from zero.
    void flush(double* out) {
        for (int r = 0; r < rows_; ++r)
            for (int c = 0; c < 4; ++c) {
                v8& sum = copies_[static_cast<std::size_t>(4 * r + c)].v;
                for (int k = 0; k < ORDER; ++k) out[k * rows_ + r] += sum[k];
                sum = v8{};
            }
    }

  private:
    typedef float v8 __attribute__((vector_size(32), may_alias));
    struct alignas(32) Sum {  // a sum must not straddle two cache lines
        v8 v{};
    };

    v8& sum_of(int row, int copy) {
        return copies_[static_cast<std::size_t>(4 * row + (copy & 3))].v;
    }

#if defined(__AVX2__)
    struct EightPlaces {
        __m256 s;
        alignas(32) int row[8];
        ALWAYS_INLINE EightPlaces(const Table& t, const float* x) {
            const __m256 last = _mm256_set1_ps(static_cast<float>(t.knots - 1)), zero = _mm256_setzero_ps();
            const __m256 z = _mm256_fmadd_ps(_mm256_loadu_ps(x), _mm256_set1_ps(t.inverse_gamma),
                                             _mm256_set1_ps(0.5f * static_cast<float>(t.knots - 1)));
            const __m256i knot = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(z, zero), last));
            s = _mm256_sub_ps(z, _mm256_cvtepi32_ps(knot));
            const __m256i below = _mm256_castps_si256(_mm256_cmp_ps(z, zero, _CMP_LT_OQ));
            const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(z, last, _CMP_GT_OQ));
            _mm256_store_si256(reinterpret_cast<__m256i*>(row),
                               _mm256_sub_epi32(_mm256_add_epi32(
                                   _mm256_add_epi32(knot, _mm256_set1_epi32(1)), below), above));
        }
    };

    ALWAYS_INLINE void add_powers(const Table& t, const float* x, const float* g) {
        const EightPlaces at(t, x);
        const __m256 p0 = g ? _mm256_loadu_ps(g) : _mm256_set1_ps(1.0f);
        const __m256 p1 = _mm256_mul_ps(p0, at.s), p2 = _mm256_mul_ps(p1, at.s);
        const __m256 p3 = _mm256_mul_ps(p2, at.s), p4 = _mm256_mul_ps(p3, at.s);
        add_eight(at, p0, p1, p2, p3, p4);
    }

    // The five numbers of eight pixels, turned round so that those of a pixel stand together.
    ALWAYS_INLINE void add_eight(const EightPlaces& at, __m256 p0, __m256 p1, __m256 p2, __m256 p3, __m256 p4) {
        const __m256 zero = _mm256_setzero_ps();
        const int* row = at.row;
        const __m256 a = _mm256_unpacklo_ps(p0, p1), b = _mm256_unpackhi_ps(p0, p1);
        const __m256 c = _mm256_unpacklo_ps(p2, p3), d = _mm256_unpackhi_ps(p2, p3);
        const __m256 e = _mm256_unpacklo_ps(p4, zero), f = _mm256_unpackhi_ps(p4, zero);
        const __m256 four[4] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xEE),
                                _mm256_shuffle_ps(b, d, 0x44), _mm256_shuffle_ps(b, d, 0xEE)};
        const __m256 fifth[4] = {_mm256_shuffle_ps(e, zero, 0x44), _mm256_shuffle_ps(e, zero, 0xEE),
                                 _mm256_shuffle_ps(f, zero, 0x44), _mm256_shuffle_ps(f, zero, 0xEE)};
#pragma GCC unroll 4
        for (int l = 0; l < 4; ++l) {
            sum_of(row[l], l) += _mm256_permute2f128_ps(four[l], fifth[l], 0x20);
            sum_of(row[l + 4], l) += _mm256_permute2f128_ps(four[l], fifth[l], 0x31);
        }
    }
#endif

    int rows_;
    std::vector<Sum> copies_;
};
