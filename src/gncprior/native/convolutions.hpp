// Convolutions with symmetric boundary, their transposes and weight gradients, and the fused first
// layer (included by kernels.hpp, inside namespace gnc).
//
// The operator is (Kx)_o[r] = Σ_i Σ_k w[o,i,k] x̃_i[r + k − c], where x̃ continues x by reflection
// about its edges (the edge pixel repeated) and c = ⌊size/2⌋ is the filter's centre.  Everything is
// done tile by tile: the tile of the input is copied to scratch memory with its halo, where the
// boundary is settled, so that the inner loops know nothing of it.
//
// Products are of floats (Full), or of bfloat16 with sums in float (Half): twice as many at a time,
// each with three digits, which is enough for training.  Half needs instructions that only the
// avx512bf16 and amx builds have, and the latter does still more at a time (Tiled); Short is the best of a
// build, which for the others is Full.

// Register blocks: GROUP output channels × STRIP vectors of pixels.
constexpr int GROUP = 6;
constexpr int STRIP = LANES == 16 ? 4 : 2;

struct Shape {
    i64 height, width;
    i64 pixels() const { return height * width; }
};

struct Kernel {
    i64 height, width;
    i64 top() const { return height / 2; }  // how far the filter reaches up and left
    i64 left() const { return width / 2; }
    i64 size() const { return height * width; }
};

struct Box {
    i64 y0, y1, x0, x1;
    i64 rows() const { return y1 - y0; }
    i64 columns() const { return x1 - x0; }
};

// Index of the pixel that stands at i when n pixels are reflected again and again.
inline i64 reflect(i64 i, i64 n) {
    if (i >= 0 && i < n) return i;
    if (i < 0 && i >= -n) return -1 - i;
    if (i >= n && i < 2 * n) return 2 * n - 1 - i;
    i64 m = i % (2 * n);
    if (m < 0) m += 2 * n;
    return m < n ? m : 2 * n - 1 - m;
}

// An image cut into equal tiles of at most the given size, none smaller than half of it.
struct Tiling {
    Shape image;
    i64 down, across;
    Tiling(Shape shape, i64 rows, i64 columns)
        : image(shape), down(ceil_div(shape.height, rows)), across(ceil_div(shape.width, columns)) {}
    i64 count() const { return down * across; }
    Box operator[](i64 i) const {
        const i64 r = i / across, c = i % across;
        return {r * image.height / down, (r + 1) * image.height / down,
                c * image.width / across, (c + 1) * image.width / across};
    }
};

// A few planes in scratch memory; rows are padded so that whole vectors may be read and written.
struct Planes {
    float* data;
    i64 stride, plane;
    float* at(i64 channel, i64 row) const { return data + channel * plane + row * stride; }
};

inline i64 padded_width(i64 columns) { return round_up(columns, LANES); }

enum class Boundary { symmetric, zero };

// A row of a tile is short: a call of memcpy would cost as much as the copy.
inline void copy_row(const float* from, i64 n, float* to) {
    i64 j = 0;
    for (; j + LANES <= n; j += LANES) store(to + j, load(from + j));
    if (j < n && n >= LANES) store(to + n - LANES, load(from + n - LANES));
    else for (; j < n; ++j) to[j] = from[j];
}

// Copies the box (which may reach beyond the image) of each channel; zeros fill the rest of the rows.
inline void copy_box(const float* image, Shape shape, i64 channels, Box box, Boundary boundary,
                     const Planes& to) {
    const i64 x0 = std::max<i64>(box.x0, 0), x1 = std::min(box.x1, shape.width);
    const bool symmetric = boundary == Boundary::symmetric;
    for (i64 y = box.y0; y < box.y1; ++y) {
        const bool known = symmetric || (y >= 0 && y < shape.height);
        const float* from = image + (known ? reflect(y, shape.height) * shape.width : 0);
        float* row = to.at(0, y - box.y0);
        for (i64 c = 0; c < channels; ++c, from += shape.pixels(), row += to.plane) {
            if (!known) {
                std::fill(row, row + to.stride, 0.0f);
                continue;
            }
            if (x1 > x0) copy_row(from + x0, x1 - x0, row + (x0 - box.x0));
            auto beyond = [&](i64 x) {
                row[x - box.x0] = symmetric ? from[reflect(x, shape.width)] : 0.0f;
            };
            for (i64 x = box.x0; x < std::min(x0, box.x1); ++x) beyond(x);
            for (i64 x = std::max(x1, box.x0); x < box.x1; ++x) beyond(x);
            for (i64 x = box.columns(); x < to.stride; ++x) row[x] = 0.0f;
        }
    }
}

// ---------------------------------------------------------------- products

// A slot is what a float takes: with Full it holds a float.
struct Full {
    static constexpr int GROUP = gnc::GROUP;  // output channels at once
    static constexpr int CHANNELS = 1;  // in a slot
    static float slot(float a, float) { return a; }
    static vec spread(const float* slot) { return splat(*slot); }
    static vec add(vec sum, vec a, vec b) { return sum + a * b; }
    static void join_channels(const Planes&, i64) {}
};

#if defined(__AVX512BF16__)
// With Half a slot holds the bfloat16 of two channels.
struct Half {
    static constexpr int GROUP = gnc::GROUP;
    static constexpr int CHANNELS = 2;
    static float slot(float a, float b) {
        const float both[2] = {a, b};
        float pair;
        const __m128bh halves = _mm_cvtneps_pbh(_mm_setr_ps(both[0], both[1], 0.0f, 0.0f));
        std::memcpy(&pair, &halves, sizeof pair);
        return pair;
    }
    static vec spread(const float* slot) {
        int bits;
        std::memcpy(&bits, slot, sizeof bits);
        return reinterpret_cast<vec>(_mm512_set1_epi32(bits));
    }
    static vec add(vec sum, vec a, vec b) {
        return reinterpret_cast<vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                      reinterpret_cast<__m512bh>(a),
                                                      reinterpret_cast<__m512bh>(b)));
    }
    // Planes 2c and 2c + 1 become plane c of pairs.
    static void join_channels(const Planes& in, i64 channels) {
        for (i64 c = 0; c < channels; c += 2) {
            const float *a = in.at(c, 0), *b = in.at(c + 1, 0);
            float* to = in.at(c / 2, 0);
            for (i64 j = 0; j < in.plane; j += LANES) {
                const __m512i low = widened(a + j);
                const __m512i high = c + 1 < channels ? widened(b + j) : _mm512_setzero_si512();
                _mm512_storeu_si512(to + j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
    }

  private:
    static __m512i widened(const float* p) {
        return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(p))));
    }
};
#endif

// ---------------------------------------------------------------- correlation of a tile

// Weights in the order in which `correlate` reads them: [group][input slot][tap][GROUP], zero-padded.
template <class Product>
class PackedFilters {
  public:
    // weight(o, i, tap) is the filter of output o and input i
    template <class F>
    PackedFilters(i64 outputs, i64 inputs, Kernel kernel, F weight)
        : kernel(kernel), inputs(ceil_div(inputs, Product::CHANNELS)), groups(ceil_div(outputs, GROUP)),
          w_(static_cast<std::size_t>(groups * this->inputs * kernel.size() * GROUP)) {
        float* p = w_.data();
        auto known = [&](i64 o, i64 i, i64 k) {
            return o < outputs && i < inputs ? weight(o, i, k) : 0.0f;
        };
        for (i64 g = 0; g < groups; ++g)
            for (i64 i = 0; i < inputs; i += Product::CHANNELS)
                for (i64 k = 0; k < kernel.size(); ++k)
                    for (i64 o = g * GROUP; o < (g + 1) * GROUP; ++o)
                        *p++ = Product::slot(known(o, i, k), known(o, i + 1, k));
    }
    const float* group(i64 g) const { return w_.data() + g * inputs * kernel.size() * GROUP; }
    const Kernel kernel;
    const i64 inputs, groups;  // inputs counts slots

  private:
    std::vector<float> w_;
};

template <class Product, int V>
inline void correlate_strip(const Planes& in, i64 y, i64 x, i64 inputs, Kernel kernel,
                            const float* w, const Planes& out) {
    vec sum[GROUP][V] = {};
    for (i64 i = 0; i < inputs; ++i)
        for (i64 ky = 0; ky < kernel.height; ++ky) {
            const float* row = in.at(i, y + ky) + x;
            for (i64 kx = 0; kx < kernel.width; ++kx, w += GROUP) {
                vec pixels[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) pixels[v] = load(row + kx + v * LANES);
#pragma GCC unroll 8
                for (int o = 0; o < GROUP; ++o) {
                    const vec weight = Product::spread(w + o);
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) sum[o][v] = Product::add(sum[o][v], weight, pixels[v]);
                }
            }
        }
#pragma GCC unroll 8
    for (int o = 0; o < GROUP; ++o)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(out.at(o, y) + x + v * LANES, sum[o][v]);
}

// out_o[y][x] = Σ_i Σ_k w[o,i,k] in_i[y + k_y][x + k_x] for the GROUP outputs of one group.
template <class Product>
inline void correlate(const Planes& in, i64 inputs, Kernel kernel, const float* w, i64 rows,
                      i64 columns, const Planes& out) {
    const i64 vectors = ceil_div(columns, LANES), strips = ceil_div(vectors, STRIP);
    for (i64 y = 0; y < rows; ++y)
        for (i64 s = 0; s < strips; ++s) {
            const i64 first = s * vectors / strips, n = (s + 1) * vectors / strips - first;
            const i64 x = first * LANES;
            if (n == 1) correlate_strip<Product, 1>(in, y, x, inputs, kernel, w, out);
            else if (n == 2) correlate_strip<Product, 2>(in, y, x, inputs, kernel, w, out);
            else if (n == 3)
                correlate_strip<Product, STRIP < 3 ? STRIP : 3>(in, y, x, inputs, kernel, w, out);
            else correlate_strip<Product, STRIP>(in, y, x, inputs, kernel, w, out);
        }
}

// The same with one output channel, which leaves no channels to block over: a vector of pixels,
// once loaded, serves BLOCK rows of the output instead.  Weights are [input][k_x][k_y].
template <int BLOCK, int V, int KH>
inline void correlate_rows(const Planes& in, i64 y, i64 x, i64 inputs, i64 kernel_width,
                           const float* w, float* out, i64 stride) {
    vec sum[BLOCK][V];
#pragma GCC unroll 16
    for (int b = 0; b < BLOCK; ++b)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[b][v] = load(out + (y + b) * stride + x + v * LANES);
    for (i64 i = 0; i < inputs; ++i)
        for (i64 kx = 0; kx < kernel_width; ++kx, w += KH) {
            vec weight[KH];
#pragma GCC unroll 16
            for (int k = 0; k < KH; ++k) weight[k] = splat(w[k]);
#pragma GCC unroll 32
            for (int r = 0; r < BLOCK + KH - 1; ++r) {
                const float* row = in.at(i, y + r) + x + kx;
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const vec pixels = load(row + v * LANES);
#pragma GCC unroll 16
                    for (int b = 0; b < BLOCK; ++b)
                        if (r - b >= 0 && r - b < KH) sum[b][v] += weight[r - b] * pixels;
                }
            }
        }
#pragma GCC unroll 16
    for (int b = 0; b < BLOCK; ++b)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(out + (y + b) * stride + x + v * LANES, sum[b][v]);
}

// Any filter height, a row at a time.
inline void correlate_row(const Planes& in, i64 y, i64 x, i64 inputs, Kernel kernel, const float* w,
                          float* out, i64 stride) {
    vec sum = load(out + y * stride + x);
    for (i64 i = 0; i < inputs; ++i)
        for (i64 kx = 0; kx < kernel.width; ++kx, w += kernel.height)
            for (i64 ky = 0; ky < kernel.height; ++ky)
                sum += splat(w[ky]) * load(in.at(i, y + ky) + x + kx);
    store(out + y * stride + x, sum);
}

// From row y on, as many whole blocks of rows as there are; returns the first row left over.
template <int BLOCK, int KH>
inline i64 correlate_blocks(const Planes& in, i64 y, i64 inputs, Kernel kernel, const float* w, i64 rows,
                            i64 columns, float* out, i64 stride) {
    for (; y + BLOCK <= rows; y += BLOCK) {
        i64 x = 0;
        for (; x + LANES < columns; x += 2 * LANES)
            correlate_rows<BLOCK, 2, KH>(in, y, x, inputs, kernel.width, w, out, stride);
        if (x < columns)
            correlate_rows<BLOCK, 1, KH>(in, y, x, inputs, kernel.width, w, out, stride);
    }
    return y;
}

template <int KH>
inline void correlate_height(const Planes& in, i64 inputs, Kernel kernel, const float* w, i64 rows,
                             i64 columns, float* out, i64 stride) {
    i64 y = 0;
    if (LANES == 16) y = correlate_blocks<8, KH>(in, y, inputs, kernel, w, rows, columns, out, stride);
    y = correlate_blocks<4, KH>(in, y, inputs, kernel, w, rows, columns, out, stride);
    y = correlate_blocks<2, KH>(in, y, inputs, kernel, w, rows, columns, out, stride);
    correlate_blocks<1, KH>(in, y, inputs, kernel, w, rows, columns, out, stride);
}

// out[y][x] += Σ_i Σ_k w[i,k] in_i[y + k_y][x + k_x]
inline void correlate_to_one(const Planes& in, i64 inputs, Kernel kernel, const float* w, i64 rows,
                             i64 columns, float* out, i64 stride) {
    if (kernel.height == 7) correlate_height<7>(in, inputs, kernel, w, rows, columns, out, stride);
    else if (kernel.height == 5) correlate_height<5>(in, inputs, kernel, w, rows, columns, out, stride);
    else if (kernel.height == 3) correlate_height<3>(in, inputs, kernel, w, rows, columns, out, stride);
    else
        for (i64 y = 0; y < rows; ++y)
            for (i64 x = 0; x < columns; x += LANES)
                correlate_row(in, y, x, inputs, kernel, w, out, stride);
}

// Weights of the transpose for `correlate_to_one`: the flipped filters [output][k_x][k_y] of input i.
inline std::vector<float> flipped_columns(const float* w, i64 outputs, i64 inputs, i64 i, Kernel k) {
    std::vector<float> flipped(static_cast<std::size_t>(outputs * k.size()));
    for (i64 o = 0; o < outputs; ++o)
        for (i64 kx = 0; kx < k.width; ++kx)
            for (i64 ky = 0; ky < k.height; ++ky)
                flipped[static_cast<std::size_t>((o * k.width + kx) * k.height + ky)] =
                    w[(o * inputs + i) * k.size() + (k.height - 1 - ky) * k.width +
                      (k.width - 1 - kx)];
    return flipped;
}

// ---------------------------------------------------------------- transposed boundary

// The part of the reflected image that a tile of the image answers for: the tile itself and, where
// it touches the image's edge, the filter's reach beyond.
inline Box with_reflections(Box tile, Shape image, Kernel k) {
    return {tile.y0 == 0 ? -k.top() : tile.y0,
            tile.y1 == image.height ? image.height + (k.height - 1 - k.top()) : tile.y1,
            tile.x0 == 0 ? -k.left() : tile.x0,
            tile.x1 == image.width ? image.width + (k.width - 1 - k.left()) : tile.x1};
}

// The responses that see any pixel of the box (in the coordinates of the reflected image).
inline Box responses_of(Box box, Kernel k) {
    return {box.y0 - (k.height - 1 - k.top()), box.y1 + k.top(),
            box.x0 - (k.width - 1 - k.left()), box.x1 + k.left()};
}

inline Box pixels_of(Box box, Kernel k) {
    return {box.y0 - k.top(), box.y1 + (k.height - 1 - k.top()), box.x0 - k.left(),
            box.x1 + (k.width - 1 - k.left())};
}

// Adds what lies beyond the image's edge to the pixels it is a reflection of, then writes the tile.
inline void fold_and_write(float* box_data, i64 stride, Box box, Box tile, Shape image, float* out) {
    auto row = [&](i64 y) { return box_data + (y - box.y0) * stride - box.x0; };
    for (i64 y = box.y0; y < box.y1; ++y)
        if (y < tile.y0 || y >= tile.y1) {
            float* to = row(reflect(y, image.height));
            const float* from = row(y);
            for (i64 x = box.x0; x < box.x1; ++x) to[x] += from[x];
        }
    for (i64 y = tile.y0; y < tile.y1; ++y) {
        float* r = row(y);
        for (i64 x = box.x0; x < tile.x0; ++x) r[reflect(x, image.width)] += r[x];
        for (i64 x = tile.x1; x < box.x1; ++x) r[reflect(x, image.width)] += r[x];
        std::memcpy(out + y * image.width + tile.x0, r + tile.x0, sizeof(float) * tile.columns());
    }
}

// ---------------------------------------------------------------- the operators

inline i64 tile_side(i64 wanted, i64 kernel_side) { return std::max(wanted, 4 * kernel_side); }

// Rows of a tile so that the tile of all channels, with halo, stays within the second-level cache.
inline i64 tile_rows(i64 channels, i64 columns, Kernel k) {
    const i64 budget = 96 * 1024;  // floats
    return tile_side(std::clamp<i64>(budget / (channels * (columns + k.width)), 8, 64), k.height);
}

inline Planes planes(float* data, i64 rows, i64 columns, i64 slack) {
    const i64 stride = padded_width(columns) + round_up(slack, LANES);
    return {data, stride, stride * rows};
}

template <class Product>
inline void convolve(const float* x, const float* w, i64 images, i64 inputs, i64 outputs, Shape shape,
                     Kernel k, float* out, int threads) {
    const PackedFilters<Product> packed(outputs, inputs, k, [&](i64 o, i64 i, i64 tap) {
        return w[(o * inputs + i) * k.size() + tap];
    });
    const i64 columns = tile_side(LANES == 16 ? 96 : 4 * STRIP * LANES, k.width);
    const Tiling tiles(shape, tile_rows(inputs, columns, k), columns);
    parallel_for(images * tiles.count(), threads, [&](i64 task) {
        thread_local Scratch in_memory, out_memory;
        const i64 image = task / tiles.count();
        const Box tile = tiles[task % tiles.count()];
        const Box halo = pixels_of(tile, k);
        Planes in = planes(nullptr, halo.rows(), tile.columns(), k.width - 1);
        in.data = in_memory.get(in.plane * inputs);
        copy_box(x + image * inputs * shape.pixels(), shape, inputs, halo, Boundary::symmetric, in);
        Product::join_channels(in, inputs);
        Planes group = planes(nullptr, tile.rows(), tile.columns(), 0);
        group.data = out_memory.get(group.plane * Product::GROUP);
        for (i64 g = 0; g < packed.groups; ++g) {
            correlate<Product>(in, packed.inputs, k, packed.group(g), tile.rows(), tile.columns(), group);
            const i64 first = g * Product::GROUP;
            for (i64 o = first; o < std::min(first + Product::GROUP, outputs); ++o)
                for (i64 y = 0; y < tile.rows(); ++y)
                    std::memcpy(out + ((image * outputs + o) * shape.height + tile.y0 + y) * shape.width +
                                    tile.x0,
                                group.at(o - first, y), sizeof(float) * tile.columns());
        }
    });
}

template <class Product>
inline void convolve_transpose(const float* r, const float* w, i64 images, i64 inputs, i64 outputs,
                               Shape shape, Kernel k, float* out, int threads) {
    const bool few = inputs < GROUP;
    const PackedFilters<Product> packed(few ? 0 : inputs, outputs, k, [&](i64 i, i64 o, i64 tap) {
        return w[(o * inputs + i) * k.size() + k.size() - 1 - tap];
    });
    std::vector<std::vector<float>> flipped;
    for (i64 i = 0; few && i < inputs; ++i) flipped.push_back(flipped_columns(w, outputs, inputs, i, k));
    const i64 columns = tile_side(LANES == 16 ? 96 : 4 * STRIP * LANES, k.width);
    const Tiling tiles(shape, tile_rows(outputs, columns, k), columns);
    parallel_for(images * tiles.count(), threads, [&](i64 task) {
        thread_local Scratch in_memory, out_memory;
        const i64 image = task / tiles.count();
        const Box tile = tiles[task % tiles.count()];
        const Box box = with_reflections(tile, shape, k);
        const Box seen = responses_of(box, k);
        Planes in = planes(nullptr, seen.rows(), box.columns(), k.width - 1);
        in.data = in_memory.get(in.plane * outputs);
        copy_box(r + image * outputs * shape.pixels(), shape, outputs, seen, Boundary::zero, in);
        Planes group = planes(nullptr, box.rows(), box.columns(), 0);
        group.data = out_memory.get(group.plane * Product::GROUP);
        auto write = [&](i64 i, i64 plane) {
            fold_and_write(group.at(plane, 0), group.stride, box, tile, shape,
                           out + (image * inputs + i) * shape.pixels());
        };
        for (i64 i = 0; few && i < inputs; ++i) {
            std::memset(group.data, 0, sizeof(float) * group.plane);
            correlate_to_one(in, outputs, k, flipped[static_cast<std::size_t>(i)].data(), box.rows(),
                             box.columns(), group.data, group.stride);
            write(i, 0);
        }
        if (!few) Product::join_channels(in, outputs);
        for (i64 g = 0; g < packed.groups; ++g) {
            correlate<Product>(in, packed.inputs, k, packed.group(g), box.rows(), box.columns(), group);
            const i64 first = g * Product::GROUP;
            for (i64 i = first; i < std::min(first + Product::GROUP, inputs); ++i) write(i, i - first);
        }
    });
}

// ---------------------------------------------------------------- weight gradient

#if defined(__AVX512F__)
#include "turned.hpp"
#else
// total[k_x][o] += Σ_pixels r_o · x[· + k_x], lane by lane, for O outputs and K neighbouring taps in one
// sweep; `outputs` is how many totals a tap has.
template <int O, int K>
inline void weight_grad_block(const Planes& in, i64 i, i64 ky, i64 kx, const Planes& r, i64 o, i64 rows,
                              i64 columns, vec* totals, i64 outputs) {
    vec total[O][K];
#pragma GCC unroll 8
    for (int c = 0; c < O; ++c)
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k) total[c][k] = totals[k * outputs + c];
    for (i64 y = 0; y < rows; ++y) {
        const float* pixels = in.at(i, y + ky);
        for (i64 x = 0; x < columns; x += LANES) {
            vec shifted[K];
#pragma GCC unroll 8
            for (int k = 0; k < K; ++k) shifted[k] = load(pixels + x + kx + k);
#pragma GCC unroll 8
            for (int c = 0; c < O; ++c) {
                const vec response = load(r.at(o + c, y) + x);
#pragma GCC unroll 8
                for (int k = 0; k < K; ++k) total[c][k] += response * shifted[k];
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < O; ++c)
#pragma GCC unroll 8
        for (int k = 0; k < K; ++k) totals[k * outputs + c] = total[c][k];
}

// dw[o,i,k] = Σ over images and pixels of r_o[p] x̃_i[p + k − c].  A task is a block of outputs and inputs
// for all images, so that the order of the sums never depends on the threads.  Tiles are so flat that
// the responses swept at once stay in the first-level cache while the inputs go by.
inline void plain_weight_grad(const float* x, const float* r, i64 images, i64 inputs, i64 outputs, Shape shape,
                        Kernel k, float* dw, int threads) {
    constexpr i64 BLOCK = 24;  // outputs, and inputs, of a task
    const i64 across = ceil_div(inputs, BLOCK);
    const Tiling tiles(shape, tile_side(24, k.height), tile_side(64, k.width));
    parallel_for(ceil_div(outputs, BLOCK) * across, threads, [&](i64 task) {
        thread_local Scratch in_memory, response_memory, totals_memory;
        const i64 o0 = task / across * BLOCK, n = std::min(BLOCK, outputs - o0);
        const i64 i0 = task % across * BLOCK, m = std::min(BLOCK, inputs - i0);
        vec* totals = reinterpret_cast<vec*>(totals_memory.get(m * k.size() * n * LANES));
        std::fill(totals, totals + m * k.size() * n, vec{});  // [input][tap][output]
        for (i64 image = 0; image < images; ++image)
            for (i64 index = 0; index < tiles.count(); ++index) {
                const Box tile = tiles[index];
                const Box halo = pixels_of(tile, k);
                Planes in = planes(nullptr, halo.rows(), tile.columns(), k.width - 1);
                in.data = in_memory.get(in.plane * m);
                copy_box(x + (image * inputs + i0) * shape.pixels(), shape, m, halo, Boundary::symmetric,
                         in);
                Planes response = planes(nullptr, tile.rows(), tile.columns(), 0);
                response.data = response_memory.get(response.plane * n);
                copy_box(r + (image * outputs + o0) * shape.pixels(), shape, n, tile, Boundary::zero,
                         response);
                for (i64 i = 0; i < m; ++i)
                    for (i64 ky = 0; ky < k.height; ++ky) {
                        i64 kx = 0;
                        auto sweep = [&](auto outputs_at_once, auto taps) {
                            constexpr int O = decltype(outputs_at_once)::value, K = decltype(taps)::value;
                            for (; kx + K <= k.width; kx += K) {
                                i64 o = 0;
                                auto block = [&](auto some) {
                                    constexpr int S = decltype(some)::value;
                                    vec* to = totals + (i * k.size() + ky * k.width + kx) * n + o;
                                    weight_grad_block<S, K>(in, i, ky, kx, response, o, tile.rows(),
                                                                     tile.columns(), to, n);
                                    o += S;
                                };
                                while (o + O <= n) block(std::integral_constant<int, O>{});
                                while (o < n) block(std::integral_constant<int, 1>{});
                            }
                        };
                        using std::integral_constant;
                        sweep(integral_constant<int, 2>{}, integral_constant<int, 5>{});
                        sweep(integral_constant<int, 3>{}, integral_constant<int, 3>{});
                        sweep(integral_constant<int, 6>{}, integral_constant<int, 1>{});
                    }
            }
        for (i64 i = 0; i < m; ++i)
            for (i64 tap = 0; tap < k.size(); ++tap)
                for (i64 o = 0; o < n; ++o)
                    dw[((o0 + o) * inputs + i0 + i) * k.size() + tap] =
                        sum(totals[(i * k.size() + tap) * n + o]);
    });
}
template <class Product>
constexpr auto weight_grad = plain_weight_grad;
#endif

#if defined(__AMX_BF16__)
using Short = Tiled;
#elif defined(__AVX512BF16__)
using Short = Half;
#else
using Short = Full;
#endif

// ---------------------------------------------------------------- the fused first layer

// For one layer of experts, in one pass over tiles that stay in cache: u = K x, then
//   grad = Kᵀ φ'(u)   if wanted,   and   sums[s] = Σ_j Σ_p ψ_s,j(u_j[p])
// for each of the `n_sums` families of tables ψ_s (φ, ∂φ/∂t̂, ∂²φ/∂t̂²).
struct Experts {
    const float* tables;  // [image][filter][ORDER][knots + 2]
    const float* inverse_gamma;  // [image][filter]
    int knots;
    i64 filters;
    Table operator()(i64 image, i64 filter) const {
        const i64 map = image * filters + filter;
        return {tables + map * ORDER * (knots + 2), knots, inverse_gamma[map]};
    }
};

inline void first_layer(const float* x, const float* w, i64 images, i64 channels, i64 filters, Shape shape,
                        Kernel k, const Experts& phi, const Experts* psi, int n_sums, float* grad,
                        double* sums, int threads) {
    const PackedFilters<Full> packed(filters, channels, k, [&](i64 o, i64 i, i64 tap) {
        return w[(o * channels + i) * k.size() + tap];
    });
    std::vector<std::vector<float>> flipped;
    for (i64 c = 0; c < channels; ++c) flipped.push_back(flipped_columns(w, filters, channels, c, k));
    // with the halo of a 7×7 filter these tiles are 128 wide and their GROUP planes fit in 0.3 MB
    const Tiling tiles(shape, tile_side(66, k.height), tile_side(128 - (k.width - 1), k.width));
    std::vector<double> partial(static_cast<std::size_t>(images * tiles.count() * n_sums));
    parallel_for(images * tiles.count(), threads, [&](i64 task) {
        thread_local Scratch in_memory, group_memory, box_memory;
        const i64 image = task / tiles.count();
        const Box tile = tiles[task % tiles.count()];
        const Box box = with_reflections(tile, shape, k);
        const Box seen = grad ? responses_of(box, k) : tile;
        // only responses inside the image exist; those beyond it count as zero in the transpose
        const Box real{std::max<i64>(seen.y0, 0), std::min(seen.y1, shape.height),
                       std::max<i64>(seen.x0, 0), std::min(seen.x1, shape.width)};
        const Box halo = pixels_of(seen, k);
        Planes in = planes(nullptr, halo.rows(), seen.columns(), k.width - 1);
        in.data = in_memory.get(in.plane * channels);
        copy_box(x + image * channels * shape.pixels(), shape, channels, halo, Boundary::symmetric, in);
        Planes group = planes(nullptr, seen.rows(), seen.columns(), LANES);
        group.data = group_memory.get(group.plane * GROUP + 2 * LANES);
        Planes result = planes(nullptr, box.rows(), box.columns(), 0);
        if (grad) {
            result.data = box_memory.get(result.plane * channels);
            std::memset(result.data, 0, sizeof(float) * result.plane * channels);
        }
        for (i64 g = 0; g < packed.groups; ++g) {
            correlate<Full>(in, channels, k, packed.group(g), seen.rows(), seen.columns(), group);
            const i64 members = std::min<i64>(GROUP, filters - g * GROUP);
            for (i64 j = 0; j < members; ++j) {
                for (int s = 0; s < n_sums; ++s) {
                    const Table table = psi[s](image, g * GROUP + j);
                    for (i64 y = tile.y0; y < tile.y1; ++y)
                        partial[static_cast<std::size_t>(task * n_sums + s)] += evaluate_sum(
                            table, group.at(j, y - seen.y0) + (tile.x0 - seen.x0), tile.columns());
                }
                if (!grad) continue;
                const Table table = phi(image, g * GROUP + j);
                for (i64 y = seen.y0; y < seen.y1; ++y) {
                    float* row = group.at(j, y - seen.y0);
                    if (y < real.y0 || y >= real.y1) {
                        std::memset(row, 0, sizeof(float) * group.stride);
                        continue;
                    }
                    float* first = row + (real.x0 - seen.x0);
                    evaluate(table, first, real.columns(), {nullptr, first, nullptr});
                    std::memset(row, 0, sizeof(float) * (real.x0 - seen.x0));
                    std::memset(row + (real.x1 - seen.x0), 0,
                                sizeof(float) * (group.stride - (real.x1 - seen.x0)));
                }
            }
            for (i64 c = 0; grad && c < channels; ++c)
                correlate_to_one(group, members, k,
                                 flipped[static_cast<std::size_t>(c)].data() + g * GROUP * k.size(),
                                 box.rows(), box.columns(), result.at(c, 0), result.stride);
        }
        for (i64 c = 0; grad && c < channels; ++c)
            fold_and_write(result.at(c, 0), result.stride, box, tile, shape,
                           grad + (image * channels + c) * shape.pixels());
    });
    for (int s = 0; s < n_sums; ++s)
        for (i64 image = 0; image < images; ++image) {
            double total = 0;
            for (i64 t = 0; t < tiles.count(); ++t)
                total += partial[static_cast<std::size_t>((image * tiles.count() + t) * n_sums + s)];
            sums[s * images + image] = total;
        }
}
