// Attention of one new token a row over that row's keys and values, with scores and sums in float32.
// Built for one shape and called by decode_kernel.py, which says what each argument is. Plain loops, for any
// processor: the compiler makes vectors of them.
//   HALF      1 for bfloat16, 0 for float32
//   SIZE      of a head, a multiple of 8
//   QUERIES   heads that share a key head

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Half {  // a bfloat16: the upper half of a float32
    uint16_t bits;
};

inline float widened(float x) { return x; }

inline float widened(Half x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// So many numbers as float32: where they lie, or in `room`.
inline const float* read(const float* from, float*, int) { return from; }

inline const float* read(const Half* from, float* room, int count) {
    for (int d = 0; d < count; ++d) room[d] = widened(from[d]);
    return room;
}

inline void narrowed(float x, float* out) { *out = x; }

inline void narrowed(float x, Half* out) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0: 2^n e^r with |r| <= ln(2)/2, and seven terms of the series, which are off by 2e-7 at most.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = float(int32_t(x * 1.44269504f - 0.5f));  // of what is below 0 the nearest
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t power = (int32_t(n) + 127) << 23;
    float two;
    std::memcpy(&two, &power, sizeof two);
    return p * two;
}

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

#if HALF
using T = Half;
#else
using T = float;
#endif
constexpr int D = SIZE, G = QUERIES;
constexpr int PART = D % 32 == 0 ? 32 : 8;  // of a head at a time, so that sums stay in registers

// G queries over `count` columns, which lie one behind the other.
void attend(const T* query, const T* keys, const T* values, int64_t count, float scale, T* out, float* scores) {
    float q[G][D], room[D];
    for (int g = 0; g < G; ++g) {
        for (int d = 0; d < D; ++d) q[g][d] = scale * widened(query[g * D + d]);
    }
    for (int64_t c = 0; c < count; ++c) {
        const float* x = read(keys + c * D, room, D);
        for (int g = 0; g < G; ++g) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int d = 0; d < D; ++d) sum += q[g][d] * x[d];
            scores[g * count + c] = sum;
        }
    }
    for (int g = 0; g < G; ++g) softmax(scores + g * count, count);
    for (int part = 0; part < D; part += PART) {
        float sum[G][PART] = {};
        for (int64_t c = 0; c < count; ++c) {
            const float* x = read(values + c * D + part, room, PART);
            for (int g = 0; g < G; ++g) {
                const float weight = scores[g * count + c];
                for (int d = 0; d < PART; ++d) sum[g][d] += weight * x[d];
            }
        }
        for (int g = 0; g < G; ++g) {
            for (int d = 0; d < PART; ++d) narrowed(sum[g][d], out + g * D + part + d);
        }
    }
}

}  // namespace

extern "C" void decode_attention(const T* query, const T* key, const T* value, T* keys, T* values, T* out,
                                 const int64_t* lengths, int64_t rows, int64_t heads, int64_t columns,
                                 int64_t window, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t each = 0; each < rows * heads; ++each) {
        static thread_local std::vector<float> scores;
        const int64_t length = lengths[each / heads];
        const int64_t from = window > 0 ? std::max<int64_t>(0, length + 1 - window) : 0;
        T* own_keys = keys + each * columns * D;
        T* own_values = values + each * columns * D;
        std::memcpy(own_keys + length * D, key + each * D, D * sizeof(T));
        std::memcpy(own_values + length * D, value + each * D, D * sizeof(T));
        scores.resize(G * (length + 1 - from));
        attend(query + each * G * D, own_keys + from * D, own_values + from * D, length + 1 - from, scale,
               out + each * G * D, scores.data());
    }
}
