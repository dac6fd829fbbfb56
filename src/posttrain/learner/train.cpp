// What a training step computes on a processor between its large products: attention of packed tokens, what is
// picked of logits, norms and gates, forward and backward. Called by kernels.py, which says what each argument is.
// Sums are float32 and in an order of their own, whatever the number of threads; numbers are rounded where they are
// stored.
//   HALF      1 for bfloat16, 0 for float32

#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  // GCC takes half of that on Intel's by itself
#endif

#include <algorithm>
#include <memory>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

#if HALF && defined(__AVX512BF16__)
using E = Half;  // what is multiplied
constexpr int PAIR = 2;
#else
using E = float;
constexpr int PAIR = 1;
#endif

template <typename From, typename To>
inline void copy(const From* from, int64_t count, To* to) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) narrowed(widened(from[i]), to + i);
}

inline void copy(const Half* from, int64_t count, Half* to) { std::memcpy(to, from, count * sizeof(Half)); }

// ---------------------------------------------------------------------- products of small matrices

// Keys are multiplied so many at a time, queries ROWS at a time; going back BLOCK queries share what they add to keys.
#if MATRIX_UNIT
constexpr int ROWS = 32;
#else
constexpr int ROWS = LANES == 16 ? 8 : 4;
#endif
constexpr int TILE = 32, VECTORS = 2, BLOCK = 32, WIDTH = VECTORS * LANES;

// A left matrix: where a row begins, and how far the next row and the next PAIR of its columns are.
struct Left {
    const E* at;
    int64_t row, step;
};

#if MATRIX_UNIT

// Sums of ROWS x WIDTH numbers: registers 0 to 3. A row of 32 of the left matrix lies together: its step is PAIR.
struct Sums {
    Sums() {
        MatrixUnit::shape(16);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    Sums(const float* from, int64_t row) {
        MatrixUnit::shape(16);
        _tile_loadd(0, from, 4 * row);
        _tile_loadd(1, from + 16, 4 * row);
        _tile_loadd(2, from + 16 * row, 4 * row);
        _tile_loadd(3, from + 16 * row + 16, 4 * row);
    }
    void store(float* out, int64_t row) const {
        _tile_stored(0, out, 4 * row);
        _tile_stored(1, out + 16, 4 * row);
        _tile_stored(2, out + 16 * row, 4 * row);
        _tile_stored(3, out + 16 * row + 16, 4 * row);
    }
    // += the first `pairs` PAIRs of x times a panel, whose next PAIR is `step` behind.
    void add(Left x, int64_t pairs, const E* panel, int64_t step) {
        const int64_t left = x.row * sizeof(E), right = step * sizeof(E);
        for (int64_t k = 0; k < pairs; k += 16, x.at += 16 * PAIR, panel += 16 * step) {
            _tile_loadd(4, x.at, left);
            _tile_loadd(6, panel, right);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + 16 * PAIR, right);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x.at + 16 * x.row, left);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
};

#else

// Sums of ROWS x WIDTH numbers.
struct Sums {
    Vector sum[ROWS][VECTORS] = {};
    Sums() {}
    Sums(const float* from, int64_t row) {
        for (int i = 0; i < ROWS; ++i) std::memcpy(sum[i], from + i * row, sizeof sum[i]);
    }
    void store(float* out, int64_t row) const {
        for (int i = 0; i < ROWS; ++i) std::memcpy(out + i * row, sum[i], sizeof sum[i]);
    }
    // += the first `pairs` PAIRs of x times a panel, whose next PAIR is `step` behind.
    void add(Left x, int64_t pairs, const E* panel, int64_t step) {
        for (int64_t k = 0; k < pairs; ++k, x.at += x.step, panel += step) {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) {
                    sum[i][v] = added(sum[i][v], x.at + i * x.row, panel + v * LANES * PAIR);
                }
            }
        }
    }
};

#endif

// Keys or values of a group and key head, in the two orders in which they are multiplied.
struct Packed {
    E *by_key;   // [tile, D / PAIR, TILE, PAIR]: a query times keys
    E *by_size;  // [keys / PAIR, D, PAIR]: weights times values
};

// Rows as [rows / PAIR, columns, PAIR]; their number is a multiple of PAIR.
template <typename From>
void interleave(const From* rows, int64_t count, int64_t columns, E* out) {
#if HALF && defined(__AVX512BF16__)
    for (int64_t i = 0; i < count; i += PAIR, rows += PAIR * columns, out += PAIR * columns) {
#pragma omp simd
        for (int64_t c = 0; c < columns; ++c) {
            Half low, high;
            narrowed(widened(rows[c]), &low);
            narrowed(widened(rows[columns + c]), &high);
            const uint32_t both = uint32_t(high.bits) << 16 | low.bits;
            std::memcpy(out + 2 * c, &both, sizeof both);
        }
    }
#else
    copy(rows, count * columns, out);
#endif
}

void pack(const T* x, int64_t stride, const int64_t* token, int64_t count, int64_t padded, int64_t D, Packed to) {
    static thread_local std::vector<E> rows;
    rows.resize(TILE * D);
    for (int64_t first = 0; first < padded; first += TILE) {
        for (int64_t c = 0; c < TILE; ++c) {
            E* row = rows.data() + c * D;
            if (first + c < count) {
                copy(x + token[first + c] * stride, D, row);
            } else {
                std::memset(row, 0, D * sizeof(E));
            }
        }
        if (to.by_size) interleave(rows.data(), TILE, D, to.by_size + first * D);
        if (!to.by_key) continue;
        E* tile = to.by_key + first * D;
        for (int64_t k = 0; k < D / PAIR; ++k) {
            for (int64_t c = 0; c < TILE; ++c, tile += PAIR) {
                std::memcpy(tile, rows.data() + c * D + k * PAIR, PAIR * sizeof(E));
            }
        }
    }
}

// ---------------------------------------------------------------------- attention

// A group of packed tokens that attend among themselves, and to the first `seen` tokens of the pack.
struct Group {
    int64_t start, count, seen;
    int64_t words;  // where its words begin, for each token one for every TILE keys; -1: it sees all before it
};

struct Heads {  // [tokens, heads, D] in memory, or any other order
    T* at;
    int64_t head, token;
};

struct Task {
    Heads query, key, value;
    const Group* groups;
    const uint32_t* words;
    int64_t count, heads, shared, D, window;  // groups; query heads; how many of these share a key head
    float scale;
};

inline int64_t padded(const Group& g) { return (g.seen + g.count + TILE - 1) / TILE * TILE; }

// Which of the keys of a tile the token `row` of a group sees.
inline uint32_t visible(const Task& t, const Group& g, int64_t row, int64_t tile) {
    if (g.words >= 0) return t.words[g.words + row * (padded(g) / TILE) + tile];
    const int64_t last = g.seen + row - tile * TILE;  // itself
    if (last < 0) return 0;
    uint32_t seen = last >= TILE - 1 ? ~0u : (1u << (last + 1)) - 1;
    if (t.window > 0 && last - t.window >= 0) {
        const int64_t first = last - t.window + 1;
        seen = first >= TILE ? 0 : seen & (~0u << first);
    }
    return seen;
}

inline int64_t token_of(const Group& g, int64_t key) { return key < g.seen ? key : g.start + key - g.seen; }

// Where the packed keys of each group lie, in rows.
std::vector<int64_t> places(const Task& t) {
    std::vector<int64_t> out(t.count + 1, 0);
    for (int64_t n = 0; n < t.count; ++n) out[n + 1] = out[n] + padded(t.groups[n]);
    return out;
}

// Within a parallel region: packs what each group sees of x, of which there is room for every key head.
void pack_all(const Task& t, const Heads& x, const std::vector<int64_t>& place, E* by_key, E* by_size) {
    const int64_t keys = t.heads / t.shared, total = place.back() * t.D;
#pragma omp for schedule(dynamic)
    for (int64_t each = 0; each < t.count * keys; ++each) {
        const int64_t n = each / keys, h = each % keys;
        const Group& g = t.groups[n];
        const int64_t count = g.seen + g.count, at = h * total + place[n] * t.D;
        std::vector<int64_t> token(count);
        for (int64_t c = 0; c < count; ++c) token[c] = token_of(g, c);
        pack(x.at + h * x.head, x.token, token.data(), count, padded(g), t.D,
             {by_key ? by_key + at : nullptr, by_size ? by_size + at : nullptr});
    }
}

struct Room {  // of a thread
    std::vector<float> scores, others;
    std::vector<E> weights, pairs[2], rows[2];
    std::vector<int64_t> tiles;

    void reserve(int64_t keys, int64_t D) {
        scores.resize(ROWS * std::max(keys, D));  // which what is found is put into as well
        others.resize(ROWS * keys);
        weights.resize(ROWS * keys);
        for (auto& each : pairs) each.resize(BLOCK * keys);
        for (auto& each : rows) each.resize(BLOCK * D);
    }
};

// Tiles of which some token of these sees something.
void find_tiles(const Task& t, const Group& g, int64_t from, int64_t to, std::vector<int64_t>& tiles) {
    tiles.clear();
    for (int64_t j = 0; j < padded(g) / TILE; ++j) {
        uint32_t any = 0;
        for (int64_t row = from; row < to; ++row) any |= visible(t, g, row, j);
        if (any) tiles.push_back(j);
    }
}

void copy_rows(const Heads& x, int64_t head, int64_t token, int64_t count, int64_t most, int64_t D, E* out) {
    for (int64_t i = 0; i < count; ++i) copy(x.at + head * x.head + (token + i) * x.token, D, out + i * D);
    std::memset(out + count * D, 0, (most - count) * D * sizeof(E));
}

// out[i, c] = Σ_d x[i, d] keys[c, d] for ROWS rows and the keys of these tiles.
void by_keys(const E* x, const E* keys, const std::vector<int64_t>& tiles, int64_t D, float* out) {
    const int64_t width = tiles.size() * TILE;
    for (size_t n = 0; n < tiles.size(); ++n) {
        for (int c = 0; c < TILE; c += WIDTH) {
            Sums sums;
            sums.add({x, D, PAIR}, D / PAIR, keys + tiles[n] * TILE * D + c * PAIR, TILE * PAIR);
            sums.store(out + n * TILE + c, width);
        }
    }
}

// out[i, d] = Σ_c x[i, c] values[c, d] over the keys of these tiles.
void by_values(const E* x, const E* values, const std::vector<int64_t>& tiles, int64_t D, float* out) {
    const int64_t width = tiles.size() * TILE;
    for (int64_t d = 0; d < D; d += WIDTH) {
        Sums sums;
        for (size_t n = 0; n < tiles.size(); ++n) {
            sums.add({x + n * TILE, width, PAIR}, TILE / PAIR, values + tiles[n] * TILE * D + d * PAIR, D * PAIR);
        }
        sums.store(out + d, D);
    }
}

// Scores of what a token does not see become -infinity, the others are scaled.
void hide(const Task& t, const Group& g, int64_t row, const std::vector<int64_t>& tiles, float* s) {
    for (size_t n = 0; n < tiles.size(); ++n, s += TILE) {
        const uint32_t seen = visible(t, g, row, tiles[n]);
#if defined(__AVX512F__)
        const __m512 scale = _mm512_set1_ps(t.scale), unseen = _mm512_set1_ps(-INFINITY);
        for (int c = 0; c < TILE; c += 16) {
            _mm512_storeu_ps(s + c, _mm512_mask_mul_ps(unseen, __mmask16(seen >> c), _mm512_loadu_ps(s + c), scale));
        }
#else
        for (int c = 0; c < TILE; ++c) s[c] = (seen >> c) & 1 ? s[c] * t.scale : -INFINITY;
#endif
    }
}

void attend(const Task& t, const Group& g, int64_t head, const E* keys, const E* values, const Heads& out, float* lse,
            Room& room) {
    room.reserve(padded(g), t.D);
    for (int64_t from = 0; from < g.count; from += ROWS) {
        const int64_t few = std::min<int64_t>(ROWS, g.count - from), at = g.start + from;
        find_tiles(t, g, from, from + few, room.tiles);
        const int64_t width = room.tiles.size() * TILE;
        copy_rows(t.query, head, at, few, ROWS, t.D, room.rows[0].data());
        by_keys(room.rows[0].data(), keys, room.tiles, t.D, room.scores.data());
        float total[ROWS] = {};
        for (int64_t i = 0; i < few; ++i) {
            float *s = room.scores.data() + i * width, top = -INFINITY, sum = 0;
            E* w = room.weights.data() + i * width;
            hide(t, g, from + i, room.tiles, s);
#pragma omp simd reduction(max : top)
            for (int64_t c = 0; c < width; ++c) top = s[c] > top ? s[c] : top;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < width; ++c) sum += s[c] = exponential_or_zero(s[c] - top);
            copy(s, width, w);
            total[i] = sum;
            lse[at + i] = top + std::log(sum);
        }
        by_values(room.weights.data(), values, room.tiles, t.D, room.scores.data());
        for (int64_t i = 0; i < few; ++i) {
            T* to = out.at + head * out.head + (at + i) * out.token;
            const float *found = room.scores.data() + i * t.D, scale = 1 / total[i];
            for (int64_t d = 0; d < t.D; ++d) narrowed(found[d] * scale, to + d);
        }
    }
}

#if MATRIX_UNIT

// BLOCK rows as columns: [D, BLOCK].
void turn(const E* rows, int64_t, int64_t D, E* out) {
    for (int64_t d = 0; d < D; ++d) {
        for (int64_t i = 0; i < BLOCK; ++i) out[d * BLOCK + i] = rows[i * D + d];
    }
}
inline Left across(const E* turned, int64_t d, int64_t) { return {turned + d * BLOCK, BLOCK, PAIR}; }

#else

void turn(const E* rows, int64_t count, int64_t D, E* out) { interleave(rows, count, D, out); }
inline Left across(const E* turned, int64_t d, int64_t D) { return {turned + d * PAIR, PAIR, D * PAIR}; }

#endif

// What BLOCK queries add to the gradient of keys or values: out[d, c] += Σ_i x[i, d] w[i, c].
void add_to_keys(const E* x, const E* w, int64_t pairs, const std::vector<int64_t>& tiles, int64_t D, float* out,
                 int64_t keys) {
    const int64_t width = tiles.size() * TILE;
    for (size_t n = 0; n < tiles.size(); ++n) {
        for (int c = 0; c < TILE; c += WIDTH) {
            for (int64_t d = 0; d < D; d += ROWS) {
                float* to = out + d * keys + tiles[n] * TILE + c;
                Sums sums(to, keys);
                sums.add(across(x, d, D), pairs, w + (n * TILE + c) * PAIR, width * PAIR);
                sums.store(to, keys);
            }
        }
    }
}

struct Backward {
    Heads out, grad, query;  // the last is the gradient's
    const float* lse;
};

// The gradient of one head's queries, and what it adds to that of keys and values, [D, keys] each.
void attend_back(const Task& t, const Backward& b, const Group& g, int64_t head, const E* keys, const E* keys_by_size,
                 const E* values, float* key_grad, float* value_grad, Room& room) {
    const int64_t D = t.D, all = padded(g);
    room.reserve(all, D);
    static thread_local std::vector<E> mixed[2];
    for (auto& each : mixed) each.resize(BLOCK * D);
    for (int64_t from = 0; from < g.count; from += BLOCK) {
        const int64_t few = std::min<int64_t>(BLOCK, g.count - from), at = g.start + from;
        find_tiles(t, g, from, from + few, room.tiles);
        const int64_t width = room.tiles.size() * TILE, most = (few + ROWS - 1) / ROWS * ROWS;
        copy_rows(t.query, head, at, few, most, D, room.rows[0].data());
        copy_rows(b.grad, head, at, few, most, D, room.rows[1].data());
        for (int which = 0; which < 2; ++which) turn(room.rows[which].data(), most, D, mixed[which].data());
        for (int64_t first = 0; first < most; first += ROWS) {
            by_keys(room.rows[0].data() + first * D, keys, room.tiles, D, room.scores.data());
            by_keys(room.rows[1].data() + first * D, values, room.tiles, D, room.others.data());
            for (int64_t i = 0; i < ROWS; ++i) {
                float *s = room.scores.data() + i * width, *o = room.others.data() + i * width;
                const int64_t row = first + i;
                if (row < few) {
                    hide(t, g, from + row, room.tiles, s);
                    const T* grad = b.grad.at + head * b.grad.head + (at + row) * b.grad.token;
                    const T* out = b.out.at + head * b.out.head + (at + row) * b.out.token;
                    float common = 0;
#pragma omp simd reduction(+ : common)
                    for (int64_t d = 0; d < D; ++d) common += widened(grad[d]) * widened(out[d]);
                    const float lse = b.lse[at + row];
#pragma omp simd
                    for (int64_t c = 0; c < width; ++c) {
                        s[c] = exponential_or_zero(s[c] - lse);
                        o[c] = s[c] * (o[c] - common) * t.scale;
                    }
                } else {
                    std::fill(s, s + width, 0.0f);
                    std::fill(o, o + width, 0.0f);
                }
            }
            interleave(room.scores.data(), ROWS, width, room.pairs[0].data() + first * width);
            interleave(room.others.data(), ROWS, width, room.pairs[1].data() + first * width);
            copy(room.others.data(), ROWS * width, room.weights.data());
            by_values(room.weights.data(), keys_by_size, room.tiles, D, room.scores.data());
            for (int64_t row = first; row < std::min(few, first + ROWS); ++row) {
                T* to = b.query.at + head * b.query.head + (at + row) * b.query.token;
                copy(room.scores.data() + (row - first) * D, D, to);
            }
        }
        add_to_keys(mixed[1].data(), room.pairs[0].data(), most / PAIR, room.tiles, D, value_grad, all);
        add_to_keys(mixed[0].data(), room.pairs[1].data(), most / PAIR, room.tiles, D, key_grad, all);
    }
}

// Within a parallel region: the gradient of keys or values from what `parts` parts of each group and key head found.
// The first tokens of the pack, which several groups see, are given the sum of all in their order.
void gather(const Task& t, const std::vector<int64_t>& place, const std::vector<float>& found, int64_t parts,
            const Heads& out) {
    const int64_t keys = t.heads / t.shared, D = t.D, total = place.back() * D;
    int64_t shared = 0;
    for (int64_t n = 0; n < t.count; ++n) shared = std::max(shared, t.groups[n].seen);
#pragma omp for schedule(dynamic)
    for (int64_t each = 0; each < t.count * keys; ++each) {
        const int64_t n = each / keys, h = each % keys;
        const Group& g = t.groups[n];
        static thread_local std::vector<float> sums;
        sums.resize(TILE * D);
        for (int64_t c = 0; c < g.count; c += TILE) {
            const int64_t few = std::min<int64_t>(TILE, g.count - c);
            for (int64_t d = 0; d < D; ++d) {
                const float* from = found.data() + h * parts * total + place[n] * D + d * padded(g) + g.seen + c;
                for (int64_t i = 0; i < few; ++i) {
                    float sum = 0;
                    for (int64_t p = 0; p < parts; ++p) sum += from[p * total + i];
                    sums[i * D + d] = sum;
                }
            }
            for (int64_t i = 0; i < few; ++i) {
                if (g.start + c + i >= shared) copy(sums.data() + i * D, D, out.at + h * out.head + (g.start + c + i) * out.token);
            }
        }
    }
#pragma omp for schedule(dynamic)
    for (int64_t each = 0; each < keys * shared; ++each) {
        const int64_t h = each / shared, c = each % shared;
        for (int64_t d = 0; d < D; ++d) {
            float sum = 0;
            for (int64_t n = 0; n < t.count; ++n) {
                const Group& g = t.groups[n];
                const int64_t column = c < g.seen ? c : c - g.start + g.seen;
                if (c >= g.seen && (c < g.start || c >= g.start + g.count)) continue;
                for (int64_t p = 0; p < parts; ++p) {
                    sum += found[(h * parts + p) * total + place[n] * D + d * padded(g) + column];
                }
            }
            narrowed(sum, out.at + h * out.head + c * out.token + d);
        }
    }
}

}  // namespace

extern "C" void attention_forward(const Task* task, const Heads* out, float* lse, int64_t tokens, int threads) {
    const Task& t = *task;
    const auto place = places(t);
    const int64_t keys = t.heads / t.shared, total = place.back() * t.D;
    std::unique_ptr<E[]> room(new E[2 * keys * total]);
    E *by_key = room.get(), *by_size = by_key + keys * total;
#pragma omp parallel num_threads(threads)
    {
        const MatrixUnit unit;
        pack_all(t, t.key, place, by_key, nullptr);
        pack_all(t, t.value, place, nullptr, by_size);
        static thread_local Room own;
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < t.count * t.heads; ++each) {
            const int64_t n = each / t.heads, head = each % t.heads, at = head / t.shared * total + place[n] * t.D;
            attend(t, t.groups[n], head, by_key + at, by_size + at, *out, lse + head * tokens, own);
        }
    }
}

extern "C" void attention_backward(const Task* task, const Backward* back, const Heads* key_grad,
                                   const Heads* value_grad, int64_t tokens, int threads) {
    const Task& t = *task;
    const auto place = places(t);
    const int64_t keys = t.heads / t.shared, total = place.back() * t.D;
    // Few groups and key heads leave threads idle unless query heads add up what they find each by itself. It
    // hangs on the shapes alone, so that sums have the same order with any number of threads.
    const int64_t parts = t.count * keys < 8 ? t.shared : 1, inner = t.shared / parts;
    std::unique_ptr<E[]> room(new E[3 * keys * total]);
    E *by_key = room.get(), *by_size = by_key + keys * total, *values = by_size + keys * total;
    std::vector<float> found[2];
    for (auto& each : found) each.resize(keys * parts * total);
#pragma omp parallel num_threads(threads)
    {
        const MatrixUnit unit;
        pack_all(t, t.key, place, by_key, by_size);
        pack_all(t, t.value, place, values, nullptr);
        static thread_local Room own;
#pragma omp for schedule(dynamic)
        for (int64_t each = 0; each < t.count * keys * parts; ++each) {
            const int64_t n = each / (keys * parts), part = each % (keys * parts);
            const int64_t at = part / parts * total + place[n] * t.D, to = part * total + place[n] * t.D;
            for (int64_t head = part * inner; head < (part + 1) * inner; ++head) {
                Backward own_back = *back;
                own_back.lse += head * tokens;
                attend_back(t, own_back, t.groups[n], head, by_key + at, by_size + at, values + at,
                            found[0].data() + to, found[1].data() + to, own);
            }
        }
        gather(t, place, found[0], parts, *key_grad);
        gather(t, place, found[1], parts, *value_grad);
    }
}

// ---------------------------------------------------------------------- what is picked of logits

namespace {

constexpr int64_t RUN = 512;  // numbers that are summed in float32; runs are in float64

}  // namespace

// Of each row of logits x / temperature: log softmax[target], the entropy, the highest and log Σ e^(x - highest).
extern "C" void pick_forward(const T* logits, int64_t rows, int64_t count, const int64_t* target, float temperature,
                             float* logp, float* entropy, float* highest, float* log_total, int threads) {
    const float warmth = 1 / temperature;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* x = logits + row * count;
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < count; ++i) top = widened(x[i]) > top ? widened(x[i]) : top;
        double total = 0, mean = 0;
        for (int64_t from = 0; from < count; from += RUN) {
            float sum = 0, weighed = 0;
            const int64_t end = std::min(count, from + RUN);
#pragma omp simd reduction(+ : sum, weighed)
            for (int64_t i = from; i < end; ++i) {
                const float z = (widened(x[i]) - top) * warmth, e = exponential_or_zero(z);
                sum += e;
                weighed += e * (e > 0 ? z : 0);
            }
            total += double(sum);
            mean += double(weighed);
        }
        highest[row] = top;
        log_total[row] = float(std::log(total));
        entropy[row] = float(std::log(total) - mean / total);
        logp[row] = float(double((widened(x[target[row]]) - top) * warmth) - std::log(total));
    }
}

// Logits become the gradient of Σ d_logp · logp + d_entropy · entropy by them.
extern "C" void pick_backward(T* logits, int64_t rows, int64_t count, const int64_t* target, float temperature,
                              const float* entropy, const float* highest, const float* log_total, const float* d_logp,
                              const float* d_entropy, int threads) {
    const float warmth = 1 / temperature;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* x = logits + row * count;
        const float top = highest[row], total = log_total[row], h = entropy[row];
        const float by_logp = d_logp[row] * warmth, by_entropy = d_entropy[row] * warmth;
        const float at = (widened(x[target[row]]) - top) * warmth - total;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) {
            const float z = (widened(x[i]) - top) * warmth - total, p = exponential_or_zero(z);
            narrowed(-p * (by_logp + by_entropy * ((p > 0 ? z : 0) + h)), x + i);
        }
        const float p = exponential_or_zero(at);
        narrowed(by_logp - p * (by_logp + by_entropy * ((p > 0 ? at : 0) + h)), x + target[row]);
    }
}

// ---------------------------------------------------------------------- norms and gates

extern "C" void norm_forward(const T* x, const T* weight, int64_t rows, int64_t count, float epsilon, T* out,
                             float* scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        scale[row] = normalised(x + row * count, weight, count, epsilon, out + row * count);
    }
}

extern "C" void norm_backward(const T* x, const T* weight, const T* grad, const float* scale, int64_t rows,
                              int64_t count, T* x_grad, T* weight_grad, int threads) {
    constexpr int64_t FEW = 32;  // rows whose part of the weight's gradient is one sum
    const int64_t blocks = (rows + FEW - 1) / FEW;
    std::vector<float> parts(blocks * count, 0.0f);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            float* part = parts.data() + block * count;
            for (int64_t row = block * FEW; row < std::min(rows, (block + 1) * FEW); ++row) {
                const T *from = x + row * count, *g = grad + row * count;
                T* to = x_grad + row * count;
                const float by = scale[row];
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; ++i) sum += widened(g[i]) * widened(weight[i]) * widened(from[i]);
                const float mean = sum * by * by / float(count);
#pragma omp simd
                for (int64_t i = 0; i < count; ++i) {
                    narrowed(by * (widened(g[i]) * widened(weight[i]) - widened(from[i]) * mean), to + i);
                    part[i] += widened(g[i]) * rounded(widened(from[i]) * by);
                }
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; ++i) {
            float sum = 0;
            for (int64_t block = 0; block < blocks; ++block) sum += parts[block * count + i];
            narrowed(sum, weight_grad + i);
        }
    }
}

// round(silu(gate)) · up
extern "C" void gate_forward(const T* gate, const T* up, int64_t count, T* out, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) narrowed(rounded(silu(widened(gate[i]))) * widened(up[i]), out + i);
}

extern "C" void gate_backward(const T* gate, const T* up, const T* grad, int64_t count, T* gate_grad, T* up_grad,
                              int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const float x = widened(gate[i]), g = widened(grad[i]), s = silu(x);
        const float e = exponential(-std::fabs(x)), sigmoid = (x < 0 ? e : 1.0f) / (1 + e);
        narrowed(g * widened(up[i]) * (sigmoid + s * (1 - sigmoid)), gate_grad + i);
        narrowed(g * rounded(s), up_grad + i);
    }
}

// x · cos + (-x₂, x₁) · sin of the halves x₁, x₂ of every head, each product rounded; or, back, its transpose.
// x, out: [tokens, heads, size]; cosine, sine: [tokens, size].
extern "C" void rotate(const T* x, const T* cosine, const T* sine, int64_t tokens, int64_t heads, int64_t size,
                       int64_t back, T* out, int threads) {
    const int64_t half = size / 2;
    const float sign = back ? -1 : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *c = cosine + token * size, *s = sine + token * size;
        const T *first = back ? s + half : s, *second = back ? s : s + half;
        for (int64_t head = token * heads; head < (token + 1) * heads; ++head) {
            const T* from = x + head * size;
            T* to = out + head * size;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = widened(from[i]), b = widened(from[i + half]);
                narrowed(rounded(a * widened(c[i])) - sign * rounded(b * widened(first[i])), to + i);
                narrowed(rounded(b * widened(c[i + half])) + sign * rounded(a * widened(second[i])), to + i + half);
            }
        }
    }
}

// The patterns of float32 numbers of which a bfloat16 is the rounded one, and `rest` the difference of the patterns.
extern "C" void join(const uint16_t* weight, const int16_t* rest, int64_t count, uint32_t* out, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) out[i] = (uint32_t(weight[i]) << 16) + uint32_t(int32_t(rest[i]));
}

// And apart: rounded to nearest, ties to even; of what is no number the difference means nothing.
extern "C" void part(const uint32_t* numbers, int64_t count, uint16_t* weight, int16_t* rest, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = numbers[i];
        const uint32_t high = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        const int32_t difference = int32_t(bits - (high << 16));
        weight[i] = uint16_t(high);
        rest[i] = int16_t(difference > 0x7FFF ? 0x7FFF : difference < -0x8000 ? -0x8000 : difference);
    }
}
