// Numbers as the kernels of this project store, widen and multiply them: bfloat16 and float32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

// The same, and 0 for what lies far below, -infinity among it. A condition in place of the product makes no vectors.
inline float exponential_or_zero(float x) { return exponential(x) * float(x >= -87.0f); }

#if HALF
using T = Half;  // what is stored
#else
using T = float;
#endif

inline float rounded(float x) {  // as if it had been stored
    T stored;
    narrowed(x, &stored);
    return widened(stored);
}

// RMSNorm, https://arxiv.org/abs/1910.07467: out = weight · round(x · s), in place if it is x, and s, which is returned,
// is 1 / √(mean x² + epsilon).
inline float normalised(const T* x, const T* weight, int64_t count, float epsilon, T* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += widened(x[i]) * widened(x[i]);
    const float scale = 1 / std::sqrt(sum / float(count) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) narrowed(widened(weight[i]) * rounded(widened(x[i]) * scale), out + i);
    return scale;
}

inline float silu(float x) {
    const float e = exponential(-std::fabs(x));
    return x * (x < 0 ? e : 1.0f) / (1 + e);
}

#if HALF && defined(__AMX_BF16__)
#define MATRIX_UNIT 1
#endif

// A processor's matrix unit: eight registers of at most 16 rows of 64 bytes. compiled.py asks for the right to use it.
// To be held by each thread of a parallel region that does.
class MatrixUnit {
  public:
    MatrixUnit() { rows = 0; }
#if MATRIX_UNIT
    ~MatrixUnit() { _tile_release(); }
    // Gives the first seven registers so many rows, and the last 16; what they held is lost.
    static void shape(int wanted) {
        if (rows == wanted) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; ++i) {
            shapes.bytes[i] = 64;
            shapes.rows[i] = i < 7 ? wanted : 16;
        }
        asm volatile("" : : "r"(&shapes) : "memory");  // all of it is read, which the compiler is not told
        _tile_loadconfig(&shapes);
        rows = wanted;
    }
#endif

  private:
    static inline thread_local int rows;  // that this thread's registers have
};

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));

// sum + x · panel, where x stands for every lane: one number, or of bfloat16 two with their products' sum.
inline Vector added(Vector sum, const float* x, const float* panel) {
    Vector w;
    std::memcpy(&w, panel, sizeof w);
    return sum + *x * w;
}

#if defined(__AVX512BF16__)
inline Vector added(Vector sum, const Half* x, const Half* panel) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                    (__m512bh)_mm512_loadu_si512(panel));
}
#endif

}  // namespace
