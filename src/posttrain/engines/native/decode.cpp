// What sampling computes on a processor: attention of one new token a row over that row's keys and values, products
// of a few rows with a weight, all layers of a Llama-like model in one call, for new tokens of answers or all of
// prompts, and the draws of tokens from rows of logits. Scores and sums are float32. What is stored between them is
// rounded where transformers rounds it, so that the learner, which runs transformers' code, says the same. Built for
// one shape and called by decode_kernel.py and compiled_step.py, which say what each argument is. Mostly plain loops:
// the compiler makes vectors of them.
//   HALF      1 for bfloat16, 0 for float32
//   SIZE      of a head, a multiple of 8
//   QUERIES   heads that share a key head

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <omp.h>

#include "numbers.h"

namespace {

// Scores become weights that sum to 1.
void softmax(float* s, int64_t count) {
    float top = s[0];
#pragma omp simd reduction(max : top)
    for (int64_t c = 0; c < count; ++c) top = s[c] > top ? s[c] : top;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < count; ++c) sum += s[c] = exponential(s[c] - top);
    const float scale = 1 / sum;
#pragma omp simd
    for (int64_t c = 0; c < count; ++c) s[c] *= scale;
}

constexpr int D = SIZE, G = QUERIES;

// So many numbers of a head as a register takes, as float32.
constexpr int PIECE = D % LANES == 0 ? LANES : 8;
typedef float Piece __attribute__((vector_size(4 * PIECE)));

inline Piece piece(const float* from) {
    Piece out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline Piece piece(const Half* from) {
    typedef uint16_t Narrow __attribute__((vector_size(2 * PIECE)));
    typedef uint32_t Wide __attribute__((vector_size(4 * PIECE)));
    Narrow bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Piece)(__builtin_convertvector(bits, Wide) << 16);
}

// G queries over `count` columns, which lie one behind the other. `next`: keys that are read after them.
void attend(const T* query, const T* keys, const T* values, const T* next, int64_t count, float scale, T* out,
            float* scores) {
    constexpr int N = D / PIECE;
    Piece q[G][N];
    for (int g = 0; g < G; ++g) {
        for (int n = 0; n < N; ++n) q[g][n] = scale * piece(query + g * D + n * PIECE);
    }
    for (int64_t c = 0; c < count; ++c) {
        __builtin_prefetch(values + c * D);  // which are read next
        __builtin_prefetch(values + c * D + D / 2);
        Piece sum[G] = {};
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            const Piece x = piece(keys + c * D + n * PIECE);
            for (int g = 0; g < G; ++g) sum[g] += q[g][n] * x;
        }
        for (int g = 0; g < G; ++g) {
            float total = 0;
#pragma omp simd reduction(+ : total)
            for (int i = 0; i < PIECE; ++i) total += sum[g][i];
            scores[g * count + c] = total;
        }
    }
    for (int g = 0; g < G; ++g) softmax(scores + g * count, count);
    constexpr int PART = N % 2 == 0 ? 2 : 1;  // of a head at a time, so that sums stay in registers
    for (int part = 0; part < N; part += PART) {
        Piece sum[G][PART] = {};
        for (int64_t c = 0; c < count; ++c) {
            __builtin_prefetch(next + c * D + part * PIECE);
#pragma GCC unroll 16
            for (int n = 0; n < PART; ++n) {
                const Piece x = piece(values + c * D + (part + n) * PIECE);
                for (int g = 0; g < G; ++g) sum[g][n] += scores[g * count + c] * x;
            }
        }
        for (int g = 0; g < G; ++g) {
            for (int n = 0; n < PART; ++n) {
                for (int i = 0; i < PIECE; ++i) narrowed(sum[g][n][i], out + g * D + (part + n) * PIECE + i);
            }
        }
    }
}

// Writes a new token's key and value of a head to column `at` of that head in a row of the cache.
inline void write(const T* key, const T* value, T* keys, T* values, int64_t at) {
    std::memcpy(keys + at * D, key, D * sizeof(T));
    std::memcpy(values + at * D, value, D * sizeof(T));
}

// What the queries of a new token that share a key head find in `keys` and `values`, of which it is at column `at`.
inline void attend_new(const T* query, const T* keys, const T* values, T* out, int64_t at, int64_t columns,
                       int64_t window, float scale) {
    static thread_local std::vector<float> scores;
    const int64_t from = window > 0 ? std::max<int64_t>(0, at + 1 - window) : 0;
    scores.resize(G * (at + 1 - from));
    attend(query, keys + from * D, values + from * D, keys + (columns + from) * D, at + 1 - from, scale, out,
           scores.data());
}

// Products. A weight is kept in panels of COLS of its rows, in which what is multiplied at once lies together:
// [in / PAIR, COLS, PAIR], with zeros up to a multiple of DEPTH. ROWS × COLS sums stay in registers over all of
// `in`, so a row's sums are the same bits whatever stands beside it.

constexpr int VECTORS = 3, COLS = LANES * VECTORS;
#if !HALF
constexpr int PAIR = 1;
constexpr bool PRODUCTS = true;
#elif defined(__AVX512BF16__)
constexpr int PAIR = 2;
constexpr bool PRODUCTS = true;
#else  // a processor without such products only imitates them, and has float32 for that
constexpr int PAIR = 2;
constexpr bool PRODUCTS = false;
inline Vector added(Vector sum, const T*, const T*) { return sum; }
#endif
#if MATRIX_UNIT
constexpr int ROWS = 32, DEPTH = 32;  // DEPTH: of `in`, multiplied at once
#elif defined(__AVX512F__)
constexpr int ROWS = 8, DEPTH = PAIR;
#else
constexpr int ROWS = 4, DEPTH = PAIR;
#endif

struct Matrix {
    const T* weight;  // packed
    const T* bias;    // null: none
    int64_t out, in;
};

inline int64_t panels(const Matrix& w) { return (w.out + COLS - 1) / COLS; }

inline int64_t padded(int64_t in) { return (in + DEPTH - 1) / DEPTH * DEPTH; }

inline const T* panel(const Matrix& w, int64_t p) { return w.weight + p * COLS * padded(w.in); }

using Sums = float[ROWS][COLS];

#if MATRIX_UNIT

// `few` rows of x times a panel; meanwhile memory brings `step` bytes of another panel for each DEPTH columns of x.
inline void tile(int64_t few, const T* x, int64_t in, const T* panel, const char* ahead, int64_t step, Sums& out) {
    constexpr int64_t WIDE = COLS * PAIR * sizeof(T), ACROSS = LANES * PAIR, DOWN = COLS * sizeof(float);
    const bool both = few > 16;
    const int64_t half = both ? (few + 1) / 2 : few, rest = few - half;  // of an odd number a row is in both halves
    const T* second = x + rest * in;
    MatrixUnit::shape(int(half));  // 0 to 2 hold the sums of one half, 3 to 5 those of the other, 6 is x and 7 the panel
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    const auto add = [&](const T* one, const T* other, int64_t stride) {
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
// Registers are named by what is written, so neither a loop nor a template can.
#define COLUMN(number, sums, more)                 \
    _tile_loadd(7, panel + number * ACROSS, WIDE); \
    _tile_loadd(6, one, stride);                   \
    _tile_dpbf16ps(sums, 6, 7);                    \
    if (both) {                                    \
        _tile_loadd(6, other, stride);             \
        _tile_dpbf16ps(more, 6, 7);                \
    }
        COLUMN(0, 0, 3)
        COLUMN(1, 1, 4)
        COLUMN(2, 2, 5)
#undef COLUMN
        panel += DEPTH * COLS, ahead += step;
    };
    int64_t k = 0;
    for (; k + DEPTH <= in; k += DEPTH) add(x + k, second + k, in * sizeof(T));
    if (k < in) {
        T tail[ROWS * DEPTH] = {};
        for (int64_t i = 0; i < few; ++i) std::memcpy(tail + i * DEPTH, x + i * in + k, (in - k) * sizeof(T));
        asm volatile("" : : "r"(tail) : "memory");
        add(tail, tail + rest * DEPTH, DEPTH * sizeof(T));
    }
    _tile_stored(0, out[0], DOWN);
    _tile_stored(1, out[0] + LANES, DOWN);
    _tile_stored(2, out[0] + 2 * LANES, DOWN);
    if (!both) return;
    _tile_stored(3, out[rest], DOWN);
    _tile_stored(4, out[rest] + LANES, DOWN);
    _tile_stored(5, out[rest] + 2 * LANES, DOWN);
}

#else

// M rows of x times a panel; meanwhile memory brings `step` bytes of another panel for each DEPTH columns of x.
template <int M = ROWS>
void tile(int64_t few, const T* x, int64_t in, const T* panel, const char* ahead, int64_t step, Sums& out) {
    if constexpr (M > 1) {
        if (few < M) return tile<M - 1>(few, x, in, panel, ahead, step, out);
    }
    Vector sum[M][VECTORS] = {};
    for (int64_t k = 0; k < in; k += PAIR, panel += COLS * PAIR, ahead += step) {
        __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sum[i][v] = added(sum[i][v], x + i * in + k, panel + v * LANES * PAIR);
        }
    }
    for (int i = 0; i < M; ++i) std::memcpy(out[i], sum[i], sizeof sum[i]);
}

#endif

// The rows `row` to `row + few` of x times panel p of w. `after`: the weight that is read next.
inline void multiply(const Matrix& w, const Matrix& after, int64_t p, const T* x, int64_t row, int64_t few, int64_t rows,
                     Sums& out) {
    const int64_t following = p + omp_get_num_threads(), beyond = following - panels(w);
    const T* next = beyond < 0 ? panel(w, following) : panel(after, beyond);
    const int64_t step = int64_t(COLS * DEPTH * sizeof(T)) * few / rows;
    const char* ahead = reinterpret_cast<const char*>(next) + COLS * w.in * sizeof(T) * row / rows;
    tile(few, x + row * w.in, w.in, panel(w, p), ahead, step, out);
    if (!w.bias) return;
    for (int i = 0; i < few; ++i) {
        for (int j = 0; j < std::min<int64_t>(COLS, w.out - p * COLS); ++j) out[i][j] += widened(w.bias[p * COLS + j]);
    }
}

// Within a parallel region: body(panel, first row, rows) for so many panels and all rows, a few rows at a time.
template <typename Body>
void share(int64_t count, int64_t rows, Body body) {
    int64_t chunk = rows;  // of a panel, which one thread should read alone, unless there are too few of them
    while (chunk > ROWS && count * ((rows + chunk - 1) / chunk) < 4 * omp_get_num_threads()) chunk = (chunk + 1) / 2;
    const int64_t blocks = (chunk + ROWS - 1) / ROWS, high = (chunk + blocks - 1) / blocks;
    chunk = blocks * high;
    const int64_t chunks = (rows + chunk - 1) / chunk;
#pragma omp for schedule(dynamic)
    for (int64_t each = 0; each < count * chunks; ++each) {
        const int64_t end = std::min(rows, (each % chunks + 1) * chunk);
        for (int64_t row = each % chunks * chunk; row < end; row += high) {
            body(each / chunks, row, std::min(high, end - row));
        }
    }
}

// What `multiply` found for panel p goes to y, or is added to it.
inline void store(const Matrix& w, int64_t p, int64_t row, int64_t few, const Sums& sums, T* y, bool add) {
    const int64_t width = std::min<int64_t>(COLS, w.out - p * COLS);
    for (int i = 0; i < few; ++i) {
        T* to = y + (row + i) * w.out + p * COLS;
        if (add) {
            for (int j = 0; j < width; ++j) narrowed(widened(to[j]) + rounded(sums[i][j]), to + j);
        } else {
            for (int j = 0; j < width; ++j) narrowed(sums[i][j], to + j);
        }
    }
}

// Within a parallel region: y = x wᵀ + b, or y += it.
void product(const Matrix& w, const Matrix& after, const T* x, T* y, int64_t rows, bool add) {
    share(panels(w), rows, [&](int64_t p, int64_t row, int64_t few) {
        Sums sums;
        multiply(w, after, p, x, row, few, rows, sums);
        store(w, p, row, few, sums, y, add);
    });
}

// A model's layers

struct Norm {
    const T* weight;  // null: none
    float epsilon;
};

struct Layer {
    Norm before_attention, query_norm, key_norm, before_mlp;
    Matrix query, key, value, output, gate, up, down;
    T *keys, *values;  // of all rows
    int64_t window;    // 0: none
    float scale;
};

// Rotary embedding of one head in place, https://arxiv.org/abs/2104.09864, as halves.
void rotate(T* x, const T* cosine, const T* sine) {
    T room[D];
    std::memcpy(room, x, sizeof room);
    for (int d = 0; d < D; ++d) {
        const float other = d < D / 2 ? -widened(room[d + D / 2]) : widened(room[d - D / 2]);
        narrowed(rounded(widened(room[d]) * widened(cosine[d])) + rounded(other * widened(sine[d])), x + d);
    }
}

// Within a parallel region: out = silu(x gateᵀ) · (x upᵀ).
void gated_product(const Layer& layer, const T* x, T* out, int64_t rows) {
    share(panels(layer.gate), rows, [&](int64_t p, int64_t row, int64_t few) {
        Sums gate, up;
        multiply(layer.gate, layer.down, p, x, row, few, rows, gate);
        multiply(layer.up, layer.down, p, x, row, few, rows, up);
        for (int i = 0; i < few; ++i) {
#pragma omp simd
            for (int j = 0; j < COLS; ++j) gate[i][j] = rounded(silu(rounded(gate[i][j]))) * rounded(up[i][j]);
        }
        store(layer.gate, p, row, few, gate, out, false);
    });
}

// e^((x - top) / temperature). The highest is taken off first: large logits over a low temperature would lose
// their small differences.
inline float weight(float x, float top, float temperature) {
    const float z = (x - top) / temperature;
    return exponential_or_zero(z);
}

float summed_weights(const T* x, int64_t count, float top, float temperature) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += weight(widened(x[i]), top, temperature);
    return sum;
}

}  // namespace

extern "C" void decode_attention(const T* query, const T* key, const T* value, T* keys, T* values, T* out,
                                 const int64_t* lengths, int64_t rows, int64_t heads, int64_t columns,
                                 int64_t window, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t each = 0; each < rows * heads; ++each) {
        const int64_t at = lengths[each / heads], begin = each * columns;
        write(key + each * D, value + each * D, keys, values, begin + at);
        attend_new(query + each * G * D, keys + begin * D, values + begin * D, out + each * G * D, at, columns, window,
                   scale);
    }
}

// Draws from rows of logits, one token for each of `row`, where equal ones lie side by side: the first at which the
// running sum of e^(logit / temperature) exceeds `uniform` times their total; the most likely where `uniform` is
// negative. logp: its log-probability, NaN where logits are broken.
extern "C" void draw_tokens(const T* logits, int64_t count, const int64_t* row, int64_t draws, const float* temperature,
                            const double* uniform, int64_t* token, double* logp, int threads) {
    constexpr int64_t BLOCK = 256;  // summed at once; only the block that is hit is searched token by token
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t begin = 0; begin < draws; ++begin) {
        if (begin && row[begin] == row[begin - 1]) continue;  // drawn with the first of its row
        const T* x = logits + row[begin] * count;
        float top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < count; ++i) top = widened(x[i]) > top ? widened(x[i]) : top;
        static thread_local std::vector<double> running;
        double total = 0;
        int64_t last = 0;  // block that is not empty
        for (int64_t n = begin; n < draws && row[n] == row[begin]; ++n) {
            const float warmth = temperature[n];
            if (n == begin || warmth != temperature[n - 1]) {
                running.clear();
                total = 0, last = 0;
                for (int64_t from = 0; from < count; from += BLOCK) {
                    const float sum = summed_weights(x + from, std::min(BLOCK, count - from), top, warmth);
                    if (sum > 0) last = from / BLOCK;
                    running.push_back(total += double(sum));
                }
            }
            int64_t found = 0;
            if (uniform[n] < 0) {
                while (found + 1 < count && widened(x[found]) != top) ++found;
            } else {
                const double target = uniform[n] * total;
                const int64_t hit = std::upper_bound(running.begin(), running.end(), target) - running.begin();
                const int64_t block = std::min(hit, last);
                double within = block ? running[block - 1] : 0;
                for (int64_t i = block * BLOCK; i < std::min(count, (block + 1) * BLOCK) && within <= target; ++i) {
                    const double one = double(weight(widened(x[i]), top, warmth));
                    if (one > 0) found = i;  // what rounding puts behind all of them is the last that can be drawn
                    within += one;
                }
            }
            token[n] = found;
            logp[n] = double((widened(x[found]) - top) / warmth) - std::log(total);
        }
    }
}

// How many numbers a weight of this shape is when packed; 0 where there are no products of it.
extern "C" int64_t packed_size(int64_t out, int64_t in) {
    return PRODUCTS && in % PAIR == 0 ? (out + COLS - 1) / COLS * COLS * padded(in) : 0;
}

extern "C" void pack(const T* weight, int64_t out, int64_t in, T* packed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < (out + COLS - 1) / COLS; ++p) {
        T* panel = packed + p * COLS * padded(in);
        for (int64_t j = 0; j < COLS; ++j) {
            const T* row = weight + (p * COLS + j) * in;
            for (int64_t k = 0; k < padded(in); k += PAIR) {
                T* to = panel + k * COLS + j * PAIR;
                if (p * COLS + j < out && k < in) {
                    std::memcpy(to, row + k, PAIR * sizeof(T));
                } else {
                    std::memset(to, 0, PAIR * sizeof(T));
                }
            }
        }
    }
}

extern "C" void linear(const Matrix* w, const T* x, T* y, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const MatrixUnit unit;
        product(*w, *w, x, y, rows, false);
    }
}

// Takes the new tokens' hidden states x, [rows, hidden], through these layers in place. Token b is at column
// lengths[b] of the cache's rows owner[2 b] to owner[2 b + 1], of which it sees the first; where `owner` is null, of
// row b.
extern "C" void decode_layers(const Layer* layers, int64_t count, const T* cosine, const T* sine, const int64_t* lengths,
                              const int64_t* owner, T* x, int64_t rows, int64_t heads, int64_t columns,
                              int threads) {
    const int64_t hidden = layers->query.in, inner = layers->gate.out, wide = heads * G * D, narrow = heads * D;
    std::unique_ptr<T[]> room(new T[rows * (hidden + 2 * wide + 2 * narrow + inner)]);
    T *normed = room.get(), *query = normed + rows * hidden, *found = query + rows * wide, *key = found + rows * wide,
      *value = key + rows * narrow, *gated = value + rows * narrow;
    const auto first_row = [&](int64_t b) { return owner ? owner[2 * b] : b; };
    const auto end_row = [&](int64_t b) { return owner ? owner[2 * b + 1] : b + 1; };
#pragma omp parallel num_threads(threads)
    {
        const MatrixUnit unit;
        const auto normalise_rows = [&](const Norm& norm) {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < rows; ++b) {
                normalised(x + b * hidden, norm.weight, hidden, norm.epsilon, normed + b * hidden);
            }
        };
        for (const Layer* layer = layers; layer < layers + count; ++layer) {
            normalise_rows(layer->before_attention);
            const Matrix* read[] = {&layer->query, &layer->key, &layer->value, &layer->output};
            T* const to[] = {query, key, value};
            const int64_t first[] = {0, panels(*read[0]), panels(*read[0]) + panels(*read[1])};
            share(first[2] + panels(*read[2]), rows, [&](int64_t p, int64_t row, int64_t few) {
                const int which = (p >= first[1]) + (p >= first[2]);
                Sums sums;
                multiply(*read[which], *read[which + 1], p - first[which], normed, row, few, rows, sums);
                store(*read[which], p - first[which], row, few, sums, to[which], false);
            });
            // In turns: of a prompt's tokens the later ones see more.
#pragma omp for schedule(static, 8)
            for (int64_t each = 0; each < rows * heads; ++each) {
                const int64_t b = each / heads;
                for (int g = 0; g <= G; ++g) {  // the key after its queries
                    T* head = g < G ? query + (each * G + g) * D : key + each * D;
                    const Norm& norm = g < G ? layer->query_norm : layer->key_norm;
                    if (norm.weight) normalised(head, norm.weight, D, norm.epsilon, head);
                    rotate(head, cosine + b * D, sine + b * D);
                }
                for (int64_t row = first_row(b); row < end_row(b); ++row) {
                    write(key + each * D, value + each * D, layer->keys, layer->values,
                          (row * heads + each % heads) * columns + lengths[b]);
                }
            }
#pragma omp for schedule(static, 8)
            for (int64_t each = 0; each < rows * heads; ++each) {
                const int64_t begin = (first_row(each / heads) * heads + each % heads) * columns * D;
                attend_new(query + each * G * D, layer->keys + begin, layer->values + begin, found + each * G * D,
                           lengths[each / heads], columns, layer->window, layer->scale);
            }
            product(layer->output, layer->gate, found, x, rows, true);
            normalise_rows(layer->before_mlp);
            gated_product(*layer, normed, gated, rows);
            product(layer->down, (layer + 1 < layers + count ? layer + 1 : layers)->query, gated, x, rows, true);
        }
    }
}
