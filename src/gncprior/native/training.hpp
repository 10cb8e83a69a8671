// What only training needs (included by kernels.hpp, inside namespace gnc): tables from weights and back,
// and the passes over the pixels of a layer between two convolutions.  Names as in tangents.py.

// ---------------------------------------------------------------- weights and tables

// β(s − m) on |s| ≤ ½: coefficient k, tap m.
constexpr double TAPS[ORDER][ORDER] = {{1 / 384.0, 19 / 96.0, 115 / 192.0, 19 / 96.0, 1 / 384.0},
                                       {-1 / 48.0, -11 / 24.0, 0, 11 / 24.0, 1 / 48.0},
                                       {1 / 16.0, 1 / 4.0, -5 / 8.0, 1 / 4.0, 1 / 16.0},
                                       {-1 / 12.0, 1 / 6.0, 0, -1 / 6.0, 1 / 12.0},
                                       {1 / 24.0, -1 / 6.0, 1 / 4.0, -1 / 6.0, 1 / 24.0}};

// The weights (channel, o, l) of a layer and, for every image, the first of the five o around its t̂
// with their β, (order, image, 5).
struct Weights {
    const std::int64_t* first;
    const float* beta;
    i64 images, channels, times;
    int knots;
    i64 length() const { return knots + ORDER - 1; }
    i64 table(i64 image, i64 channel) const { return (image * channels + channel) * ORDER * (knots + 2); }
    float beta_of(int order, i64 image, int m) const { return beta[(order * images + image) * ORDER + m]; }
};

// Tables of φ of all images and of its two derivatives in t̂ of the first `part`.
inline void expand(const Weights& at, const float* weights, i64 part, float* const tables[3], int threads) {
    parallel_for(at.images * at.channels, threads, [&](i64 task) {
        thread_local Scratch memory;
        float* c = memory.get(at.length());
        const i64 image = task / at.channels, channel = task % at.channels, n = at.knots, rows = n + 2;
        bool convex[2] = {};
        for (int order = 0; order < (image < part ? 3 : 1); ++order) {
            const float* w = weights + (channel * at.times + at.first[image]) * at.length();
            std::fill(c, c + at.length(), 0.0f);
            for (int m = 0; m < ORDER; ++m, w += at.length())
                for (i64 l = 0; l < at.length(); ++l) c[l] += at.beta_of(order, image, m) * w[l];
            float* a = tables[order] + at.table(image, channel);
            for (int k = 0; k < ORDER; ++k)
                for (i64 i = 0; i < n; ++i) {
                    float value = 0;
                    for (int m = 0; m < ORDER; ++m) value += static_cast<float>(TAPS[k][m]) * c[i + m];
                    a[k * rows + 1 + i] = value;
                }
            if (order == 0) convex[0] = a[2 * rows + 1] > 0, convex[1] = a[2 * rows + n] > 0;
            for (int k = 0; k < ORDER; ++k) {
                a[k * rows] = k < 2 || (k == 2 && convex[0]) ? a[k * rows + 1] : 0.0f;
                a[k * rows + n + 1] = k < 2 || (k == 2 && convex[1]) ? a[k * rows + n] : 0.0f;
            }
        }
    });
}

// The transpose of `expand`; `tables` are those of φ.  A task is a channel, for all images.
inline void contract(const Weights& at, const double* const grads[3], i64 part, const float* tables,
                     float* weights, int threads) {
    parallel_for(at.channels, threads, [&](i64 channel) {
        const i64 n = at.knots, rows = n + 2, length = at.length();
        std::vector<double> total(static_cast<std::size_t>(at.times * length));
        std::vector<double> c(static_cast<std::size_t>(length)), a(static_cast<std::size_t>(n));
        for (i64 image = 0; image < at.images; ++image)
            for (int order = 0; order < (image < part ? 3 : 1); ++order) {
                const float* curvature = tables + at.table(image, channel) + 2 * rows;
                const double* g = grads[order] + at.table(image, channel);
                std::fill(c.begin(), c.end(), 0.0);
                for (int k = 0; k < ORDER; ++k, g += rows) {
                    std::copy(g + 1, g + 1 + n, a.begin());
                    if (k < 2 || (k == 2 && curvature[0] > 0)) a.front() += g[0];
                    if (k < 2 || (k == 2 && curvature[n + 1] > 0)) a.back() += g[n + 1];
                    for (int m = 0; m < ORDER; ++m)
                        for (i64 i = 0; i < n; ++i) c[i + m] += TAPS[k][m] * a[i];
                }
                for (int m = 0; m < ORDER; ++m) {
                    const double beta = at.beta_of(order, image, m);
                    double* to = total.data() + (at.first[image] + m) * length;
                    for (i64 l = 0; l < length; ++l) to[l] += beta * c[l];
                }
            }
        std::copy(total.begin(), total.end(), weights + channel * at.times * length);
    });
}

// ---------------------------------------------------------------- passes over the pixels

// A layer at given t̂: its features and rates, and tables of φ (all images), φ_t̂ and αφ_t̂ − wφ_t̂t̂ (the
// first `part`).  u̇ is null where the input of the layer does not move with t̂.
struct Moving {
    const float *u, *kz, *u_dot;
    Experts phi, phi_t, mixed;
    float w;
    i64 images, part, pixels;
    i64 maps() const { return images * phi.filters; }
};

constexpr i64 PIECE = 256;  // pixels whose intermediate results stay in the first-level cache

// z = φ'Kz + (αφ_t̂ − wφ_t̂t̂) − w(2φ'_t̂ u̇ + φ''u̇²) and ḣ = φ_t̂ + φ'u̇
inline void rates(const Moving& at, float* z, float* h_dot, int threads) {
    parallel_for(at.maps(), threads, [&](i64 map) {
        const i64 image = map / at.phi.filters, channel = map % at.phi.filters;
        const bool timed = image < at.part;
        const Table phi = at.phi(image, channel);
        const Table phi_t = timed ? at.phi_t(image, channel) : phi;
        const Table mixed = timed ? at.mixed(image, channel) : phi;
        alignas(64) float d[PIECE], dd[PIECE], td[PIECE];
        for (i64 at_piece = 0; at_piece < at.pixels; at_piece += PIECE) {
            const i64 n = std::min(PIECE, at.pixels - at_piece), offset = map * at.pixels + at_piece;
            const float* u = at.u + offset;
            const float* kz = at.kz + offset;
            float* __restrict to = z + offset;
            evaluate(phi, u, n, {nullptr, d, timed && at.u_dot ? dd : nullptr});
            if (!timed) {
#pragma GCC ivdep
                for (i64 i = 0; i < n; ++i) to[i] = d[i] * kz[i];
                continue;
            }
            evaluate(phi_t, u, n, {h_dot + offset, at.u_dot ? td : nullptr, nullptr});
            evaluate(mixed, u, n, {to, nullptr, nullptr});
#pragma GCC ivdep
            for (i64 i = 0; i < n; ++i) to[i] += d[i] * kz[i];
            if (!at.u_dot) continue;
            const float* v = at.u_dot + offset;
            float* __restrict h = h_dot + offset;
#pragma GCC ivdep
            for (i64 i = 0; i < n; ++i) {
                h[i] += d[i] * v[i];
                to[i] -= at.w * v[i] * (2 * td[i] + dd[i] * v[i]);
            }
        }
    });
}

// What comes from the layer above, null where there is none: A (ones then), P and Q (zeros).
struct Above {
    const float *a, *p, *q;
};

// q = φ'Q − 2wA(φ'_t̂ + φ''u̇)
// p = φ'P + Q(φ'_t̂ + φ''u̇) + A[φ''Kz + αφ'_t̂ − wφ'_t̂t̂ − w(2φ''_t̂ u̇ + φ'''u̇²)]
// and the gradients in the tables: of φ, M(P) + Dᵀ M(A Kz + Q u̇) − w DᵀDᵀ M(A u̇²); of φ_t̂,
// M(Q) − 2w Dᵀ M(A u̇), if not null; and `second` = ⟨A, 2φ'_t̂ u̇ + φ''u̇²⟩ of every map, where there is u̇.
inline void adjoints(const Moving& at, const Above& above, float* p, float* q, double* grads, double* grads_t,
                     double* second, int threads) {
    constexpr i64 CHUNK = 4096;  // pixels whose moments may be added in float32
    parallel_for(at.maps(), threads, [&](i64 map) {
        const i64 image = map / at.phi.filters, channel = map % at.phi.filters;
        const bool timed = image < at.part, moving = timed && at.u_dot;
        const int rows = at.phi.knots + 2;
        const Table phi = at.phi(image, channel);
        thread_local Scratch memory;
        float* slopes = memory.get(3 * CHUNK + ORDER * rows);  // of φ', of which φ''' is the curvature
        float *weight = slopes + ORDER * rows, *weight_t = weight + CHUNK, *weight2 = weight_t + CHUNK;
        for (int k = 0; k < ORDER; ++k)
            for (int r = 0; r < rows; ++r)
                slopes[k * rows + r] =
                    k + 1 < ORDER ? (k + 1) * phi.a[(k + 1) * rows + r] * phi.inverse_gamma : 0.0f;
        const Table slope{slopes, phi.knots, phi.inverse_gamma};
        const Table phi_t = timed ? at.phi_t(image, channel) : phi;
        const Table mixed = timed ? at.mixed(image, channel) : phi;
        const float gain = phi.inverse_gamma, gain2 = gain * gain, w = at.w;  // d/dx = gain d/ds
        Moments sums(rows);
        double* to_phi = grads + map * ORDER * rows;
        double* to_phi_t = timed && grads_t ? grads_t + map * ORDER * rows : nullptr;
        std::fill(to_phi, to_phi + ORDER * rows, 0.0);
        if (to_phi_t) std::fill(to_phi_t, to_phi_t + ORDER * rows, 0.0);
        if (moving) second[map] = 0;
        alignas(64) float d[PIECE], dd[PIECE], ddd[PIECE], td[PIECE] = {}, tdd[PIECE];
        alignas(64) float source[PIECE] = {}, one[PIECE], zero[PIECE] = {};
        std::fill(one, one + PIECE, 1.0f);
        for (i64 chunk = 0; chunk < at.pixels; chunk += CHUNK) {
            const i64 whole = std::min(CHUNK, at.pixels - chunk);
            for (i64 inner = 0; inner < whole; inner += PIECE) {
                const i64 n = std::min(PIECE, whole - inner), offset = map * at.pixels + chunk + inner;
                const float* u = at.u + offset;
                const float* kz = at.kz + offset;
                const float* v = moving ? at.u_dot + offset : zero;
                const float* a = above.a ? above.a + offset : one;
                const float* P = above.p ? above.p + offset : zero;
                const float* Q = timed && above.q ? above.q + offset : zero;
                evaluate(slope, u, n, {d, dd, moving ? ddd : nullptr});
                if (moving || above.q) evaluate(phi_t, u, n, {nullptr, td, moving ? tdd : nullptr});
                if (timed) evaluate(mixed, u, n, {nullptr, source, nullptr});
                if (moving) {
                    float *back = q + offset, *bt = weight_t + inner, *c = weight2 + inner;
                    vec total{};
                    i64 i = 0;
                    for (; i + LANES <= n; i += LANES) {
                        const vec rate = load(v + i), factor = load(a + i) * rate, t = load(td + i);
                        const vec bend = load(dd + i) * rate;
                        total += factor * (2 * t + bend);
                        store(source + i, load(source + i) - w * rate * (2 * load(tdd + i) + load(ddd + i) * rate));
                        store(td + i, t + bend);
                        store(back + i, load(d + i) * load(Q + i) - 2 * w * load(a + i) * (t + bend));
                        store(bt + i, -2 * w * gain * factor);
                        store(c + i, -w * gain2 * factor * rate);
                    }
                    second[map] += sum(total);
                    for (; i < n; ++i) {
                        const float factor = a[i] * v[i], bend = dd[i] * v[i];
                        second[map] += factor * (2 * td[i] + bend);
                        source[i] -= w * v[i] * (2 * tdd[i] + ddd[i] * v[i]);
                        td[i] += bend;
                        back[i] = d[i] * Q[i] - 2 * w * a[i] * td[i];
                        bt[i] = -2 * w * gain * factor;
                        c[i] = -w * gain2 * factor * v[i];
                    }
                }
                float *to = p + offset, *b = weight + inner;
#pragma GCC ivdep
                for (i64 i = 0; i < n; ++i) {
                    to[i] = d[i] * P[i] + Q[i] * td[i] + a[i] * (dd[i] * kz[i] + source[i]);
                    b[i] = gain * (a[i] * kz[i] + Q[i] * v[i]);
                }
            }
            const i64 offset = map * at.pixels + chunk;
            const float* u = at.u + offset;
            sums.add_jet(phi, u, above.p ? above.p + offset : nullptr, weight, moving ? weight2 : nullptr, whole);
            sums.flush(to_phi);
            if (!to_phi_t) continue;
            sums.add_jet(phi, u, above.q ? above.q + offset : nullptr, moving ? weight_t : nullptr, nullptr, whole);
            sums.flush(to_phi_t);
        }
    });
}
