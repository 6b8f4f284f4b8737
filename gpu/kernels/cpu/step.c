/* A step's operations in float32 on x86 CPUs with AVX2, between and of products of weights in 8 and 4 bits.
 *
 * torch has each of them as 3 to 12 operations, which take 2 to 10 us each while weights pass through the
 * core's caches: three quarters of a token of a small model. Here each is one pass over its rows.
 *
 * Every pointer is to contiguous memory unless a stride (in numbers) says otherwise. Nothing is allocated,
 * and nothing read that does not belong to a row: a NaN of one request stays with it.
 */
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));

#ifdef __AVX512VNNI__
#define ROWS 8 /* of a product that are computed together: as many sums as there are registers for */
#else
#define ROWS 4
#endif

enum {
    PARALLEL = 1 << 15, /* numbers below which waking another thread takes longer than the work */
    GROUP = 16,         /* most query heads of a KV head */
    KEYS = 64,          /* keys whose scores are computed before their values are summed */
    TOP = 8127,         /* largest number of a quantised activation: 13 bits and a sign */
    INPUTS = 2048,      /* whose products fit 32 bits: 2048 * 8127 * 128 < 2^31 */
    TILE = 16,          /* outputs that are multiplied at once, by ROWS rows at most */
    AHEAD = 2048,       /* bytes between weights that are multiplied and those that are fetched */
    SLAB = 1 << 16,     /* bytes of weights that stay in a core's cache while rows pass */
    SHARED = 32,        /* inputs in a group, which share a scale and an offset (4 bits) */
};

static int threads = 1;

void set_threads(int count) { threads = count; }

INLINE f8 all(float x) { return (f8){x, x, x, x, x, x, x, x}; }

INLINE float sum(f8 x)
{
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

/* Both are x where that is NaN. */
INLINE f8 smaller(f8 limit, f8 x) { return (f8)_mm256_min_ps((__m256)limit, (__m256)x); }
INLINE f8 larger(f8 limit, f8 x) { return (f8)_mm256_max_ps((__m256)limit, (__m256)x); }

/* e^x to 2e-7 of it: 2^n times the Taylor series of the rest, which is at most ln(2) / 2. */
INLINE f8 exponential(f8 x)
{
    const f8 magic = all(12582912.0f); /* 1.5 * 2^23 rounds */
    x = smaller(all(88.0f), larger(all(-87.0f), x));
    f8 n = x * 1.44269504f + magic - magic;
    f8 r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
    f8 e = all(1.0f / 5040);
    e = e * r + 1.0f / 720;
    e = e * r + 1.0f / 120;
    e = e * r + 1.0f / 24;
    e = e * r + 1.0f / 6;
    e = e * r + 0.5f;
    e = e * r + 1.0f;
    e = e * r + 1.0f;
    i8 power = (__builtin_convertvector(n, i8) + 127) << 23;
    return e * (f8)power;
}

INLINE void norm_row(const float *x, const float *weight, float eps, float *out, long width)
{
    f8 squares = all(0.0f);
    for (long i = 0; i < width; i += 8) {
        f8 v = *(const f8 *)(x + i);
        squares += v * v;
    }
    float scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)width + eps);
    for (long i = 0; i < width; i += 8)
        *(f8 *)(out + i) = *(const f8 *)(x + i) * scale * *(const f8 *)(weight + i);
}

/* residual += part, if any; keep = residual, if any; out = its RMSNorm. Rows of `width`, a multiple of 8. */
void rms_norm(float *residual, const float *part, const float *weight, float eps, float *keep,
              long keep_stride, float *out, long rows, long width)
{
#pragma omp parallel for num_threads(threads) if (rows * width > PARALLEL)
    for (long row = 0; row < rows; row++) {
        float *x = residual + row * width;
        if (part)
            for (long i = 0; i < width; i += 8) *(f8 *)(x + i) += *(const f8 *)(part + row * width + i);
        if (keep)
            for (long i = 0; i < width; i += 8) *(f8 *)(keep + row * keep_stride + i) = *(f8 *)(x + i);
        norm_row(x, weight, eps, out + row * width, width);
    }
}

/* out [rows, width] = silu(first half) * second half of `both` [rows, 2 * width]; a multiple of 8. */
void silu_mul(const float *both, float *out, long rows, long width)
{
#pragma omp parallel for num_threads(threads) if (rows * width > PARALLEL)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += 8) {
            f8 x = *(const f8 *)(both + row * 2 * width + i);
            f8 up = *(const f8 *)(both + (row * 2 + 1) * width + i);
            *(f8 *)(out + row * width + i) = x / (1.0f + exponential(-x)) * up;
        }
}

/* Of qkv [rows, heads + 2 * kv_heads, dim]: norm queries and keys, where weights are given, rotate the first
 * `rotary` numbers of each by cos and sin [rows, rotary], in place, and store keys and values in `pool`
 * [tokens, 2 * kv_heads, dim] at `places` [rows]. dim is a multiple of 8, rotary of 16. */
void store_kv(float *qkv, long heads, long kv_heads, long dim, long rotary, const float *cos, const float *sin,
              const float *q_weight, const float *k_weight, float eps, float *pool, const int32_t *places,
              long rows)
{
    long half = rotary / 2, all_heads = heads + 2 * kv_heads;
#pragma omp parallel for num_threads(threads) if (rows * all_heads * dim > PARALLEL)
    for (long row = 0; row < rows; row++) {
        const float *c = cos + row * rotary, *s = sin + row * rotary;
        for (long head = 0; head < heads + kv_heads; head++) {
            float *x = qkv + (row * all_heads + head) * dim;
            if (q_weight) norm_row(x, head < heads ? q_weight : k_weight, eps, x, dim);
            for (long i = 0; i < half; i += 8) {
                f8 a = *(f8 *)(x + i), b = *(f8 *)(x + half + i);
                *(f8 *)(x + i) = a * *(const f8 *)(c + i) + b * *(const f8 *)(s + i);
                *(f8 *)(x + half + i) = b * *(const f8 *)(c + half + i) + a * *(const f8 *)(s + half + i);
            }
        }
        const float *kv = qkv + (row * all_heads + heads) * dim;
        float *place = pool + (long)places[row] * 2 * kv_heads * dim;
        for (long i = 0; i < 2 * kv_heads * dim; i += 8) *(f8 *)(place + i) = *(const f8 *)(kv + i);
    }
}

struct pages {
    const int32_t *table; /* of a slot */
    long size;
};

INLINE long token_at(struct pages pages, long position)
{
    return pages.table[position / pages.size] * pages.size + position % pages.size;
}

/* q . k of one query and eight keys. */
INLINE f8 scores_of(const float *q, const float *k, const long tokens[8], long dim)
{
    f8 products[8];
    for (int key = 0; key < 8; key++) products[key] = all(0.0f);
    for (long i = 0; i < dim; i += 8)
        for (int key = 0; key < 8; key++)
            products[key] += *(const f8 *)(q + i) * *(const f8 *)(k + tokens[key] + i);
    __m256 sums[2];
    for (int half = 0; half < 2; half++) {
        const __m256 *each = (const __m256 *)products + 4 * half;
        sums[half] = _mm256_hadd_ps(_mm256_hadd_ps(each[0], each[1]), _mm256_hadd_ps(each[2], each[3]));
    }
    __m256 low = _mm256_permute2f128_ps(sums[0], sums[1], 0x20);
    return (f8)(low + _mm256_permute2f128_ps(sums[0], sums[1], 0x31));
}

/* sums [8 * vectors] += shares of `keys` keys times their values. */
INLINE void add_values(int vectors, float *sums, const float *shares, const float *v, const long *tokens,
                       long keys)
{
    f8 found[4];
    for (int i = 0; i < vectors; i++) found[i] = *(const f8 *)(sums + 8 * i);
    for (long key = 0; key < keys; key++)
        for (int i = 0; i < vectors; i++) found[i] += shares[key] * *(const f8 *)(v + tokens[key] + 8 * i);
    for (int i = 0; i < vectors; i++) *(f8 *)(sums + 8 * i) = found[i];
}

/* `group` queries of one KV head over the keys at [first, end): softmax over blocks of keys, with sums that are
 * scaled when a larger score comes (Milakov and Gimelshein, arXiv 1805.02867). `k` is the head's first key of
 * the pool, whose tokens are `stride` apart; values lie `to_values` behind keys. */
INLINE void attend_group(const float *q, float *out, const float *k, long stride, long to_values, long group,
                         long dim, struct pages pages, long first, long end, float scale)
{
    float most[GROUP], total[GROUP], shares[KEYS];
    long tokens[KEYS];
    for (long g = 0; g < group; g++) {
        most[g] = -__builtin_inff();
        total[g] = 0.0f;
        for (long i = 0; i < dim; i += 8) *(f8 *)(out + g * dim + i) = all(0.0f);
    }
    for (long begin = first; begin < end; begin += KEYS) {
        long keys = MIN(end - begin, KEYS);
        for (long key = 0; key < KEYS; key++) /* behind the last key is that key again, with a share of 0 */
            tokens[key] = token_at(pages, begin + MIN(key, keys - 1)) * stride;
        for (long g = 0; g < group; g++) {
            float *sums = out + g * dim, top = most[g];
            for (long key = 0; key < keys; key += 8)
                *(f8 *)(shares + key) = scores_of(q + g * dim, k, tokens + key, dim) * scale;
            for (long key = keys; key % 8; key++) shares[key] = -__builtin_inff();
            for (long key = 0; key < keys; key++) top = shares[key] > top ? shares[key] : top;
            f8 added = all(0.0f);
            for (long key = 0; key < keys; key += 8) {
                f8 share = exponential(*(f8 *)(shares + key) - top);
                *(f8 *)(shares + key) = share;
                added += share;
            }
            float again = exponential(all(most[g] - top))[0];
            most[g] = top;
            total[g] = total[g] * again + sum(added);
            for (long i = 0; i < dim; i += 8) *(f8 *)(sums + i) *= again;
            long i = 0;
            for (; i + 32 <= dim; i += 32) add_values(4, sums + i, shares, k + to_values + i, tokens, keys);
            for (; i < dim; i += 8) add_values(1, sums + i, shares, k + to_values + i, tokens, keys);
        }
    }
    for (long g = 0; g < group; g++)
        for (long i = 0; i < dim; i += 8) *(f8 *)(out + g * dim + i) /= total[g];
}

/* One token of each row over the pages of its slot: q [rows, heads, dim], rows `q_stride` apart, to out [rows,
 * heads, dim]. `window`: how many of `lengths` [rows] keys the token sees, 0 for all. dim is a multiple of 8. */
void attend(const float *q, long q_stride, float *out, const float *pool, long heads, long kv_heads, long dim,
            const int32_t *table, long table_stride, long page_size, const int32_t *slots,
            const int32_t *lengths, long rows, long window, float scale)
{
    long group = heads / kv_heads, stride = 2 * kv_heads * dim;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * heads * lengths[0] * dim > PARALLEL)
    for (long unit = 0; unit < rows * kv_heads; unit++) {
        long row = unit / kv_heads, head = unit % kv_heads, end = lengths[row];
        long first = window && end > window ? end - window : 0;
        struct pages pages = {table + slots[row] * table_stride, page_size};
        attend_group(q + row * q_stride + head * group * dim, out + (row * heads + head * group) * dim,
                     pool + head * dim, stride, kv_heads * dim, group, dim, pages, first, end, scale);
    }
}

/* x [rows, inputs] as numbers times a unit for each row; inputs is a multiple of 16. */
static void quantise(const float *x, int16_t *numbers, float *units, long rows, long inputs)
{
#pragma omp parallel for num_threads(threads) if (rows * inputs > PARALLEL)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * inputs;
        f8 tops = all(1e-30f), invalid = all(0.0f); /* a row of zeros has a unit, too */
        for (long i = 0; i < inputs; i += 8) {
            f8 v = *(const f8 *)(from + i);
            tops = larger(tops, larger(-v, v));
            invalid += v * 0.0f; /* `larger` forgets a NaN */
        }
        float top = tops[0] + sum(invalid);
        for (int i = 1; i < 8; i++) top = tops[i] > top ? tops[i] : top;
        for (long i = 0; i < inputs; i += 16) {
            __m256i low = _mm256_cvtps_epi32((__m256)(*(const f8 *)(from + i) * (TOP / top)));
            __m256i high = _mm256_cvtps_epi32((__m256)(*(const f8 *)(from + i + 8) * (TOP / top)));
            __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
            _mm256_storeu_si256((__m256i *)(numbers + row * inputs + i), both);
        }
        units[row] = top / TOP;
    }
}

/* Sums of TILE outputs, and the weights of a pair of inputs for each: a pair of 16-bit numbers of x meets those
 * of eight or sixteen outputs in one instruction. */
#ifdef __AVX512VNNI__
typedef __m512i sixteen;

INLINE sixteen no_sums(void) { return _mm512_setzero_si512(); }
INLINE sixteen weights_at(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w)); }

INLINE void add_products(sixteen *sums, sixteen weights, int32_t pair)
{
    *sums = _mm512_dpwssd_epi32(*sums, weights, _mm512_set1_epi32(pair));
    __asm__("" : "+v"(*sums));
}

INLINE void add_sums(float *to, sixteen sums)
{
    _mm512_storeu_ps(to, _mm512_loadu_ps(to) + _mm512_cvtepi32_ps(sums));
}

INLINE sixteen words_at(const uint8_t *w) { return _mm512_loadu_si512(w); }

INLINE sixteen nibbles(sixteen words, int pair)
{
    return _mm512_and_si512(_mm512_srli_epi16(words, 4 * pair), _mm512_set1_epi16(15));
}

INLINE void add_scaled(float *to, sixteen sums, const uint16_t *scales, float of_x)
{
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
    __m512 offset = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + TILE)));
    _mm512_storeu_ps(to, _mm512_loadu_ps(to) + _mm512_cvtepi32_ps(sums) * scale + of_x * offset);
}
#else
typedef struct {
    __m256i low, high;
} sixteen;

INLINE sixteen no_sums(void) { return (sixteen){_mm256_setzero_si256(), _mm256_setzero_si256()}; }

INLINE sixteen weights_at(const int8_t *w)
{
    const __m128i *at = (const __m128i *)w;
    return (sixteen){_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
}

INLINE void add_products(sixteen *sums, sixteen weights, int32_t pair)
{
    __m256i value = _mm256_set1_epi32(pair);
    sums->low = _mm256_add_epi32(sums->low, _mm256_madd_epi16(weights.low, value));
    sums->high = _mm256_add_epi32(sums->high, _mm256_madd_epi16(weights.high, value));
    /* Without it gcc keeps one of eight sums in memory, and takes twice as long. */
    __asm__("" : "+x"(sums->low), "+x"(sums->high));
}

INLINE void add_sums(float *to, sixteen sums)
{
    *(f8 *)to += (f8)_mm256_cvtepi32_ps(sums.low);
    *(f8 *)(to + 8) += (f8)_mm256_cvtepi32_ps(sums.high);
}

INLINE sixteen words_at(const uint8_t *w)
{
    const __m256i *at = (const __m256i *)w;
    return (sixteen){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}

INLINE sixteen nibbles(sixteen words, int pair)
{
    __m256i four = _mm256_set1_epi16(15);
    return (sixteen){_mm256_and_si256(_mm256_srli_epi16(words.low, 4 * pair), four),
                     _mm256_and_si256(_mm256_srli_epi16(words.high, 4 * pair), four)};
}

INLINE f8 halves(const uint16_t *from) { return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

INLINE void add_scaled(float *to, sixteen sums, const uint16_t *scales, float of_x)
{
    *(f8 *)to += (f8)_mm256_cvtepi32_ps(sums.low) * halves(scales) + of_x * halves(scales + TILE);
    *(f8 *)(to + 8) += (f8)_mm256_cvtepi32_ps(sums.high) * halves(scales + 8) + of_x * halves(scales + TILE + 8);
}
#endif

/* sums [rows][TILE] += x wT of so many rows by TILE outputs, of `pairs` pairs of inputs. `ahead` fetches weights
 * that come later: by itself the processor does not fetch across pages. */
INLINE void multiply_rows(int rows, int ahead, const int8_t *w, const int16_t *x, long inputs, long pairs,
                          float sums[ROWS][TILE])
{
    sixteen acc[ROWS];
    for (int r = 0; r < rows; r++) acc[r] = no_sums();
    for (long i = 0; i < pairs; i++) {
        const int8_t *at = w + i * 2 * TILE;
        if (ahead && i % 2 == 0) _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
        sixteen weights = weights_at(at);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * inputs + 2 * i, sizeof pair);
            add_products(&acc[r], weights, pair);
        }
    }
    for (int r = 0; r < rows; r++) add_sums(sums[r], acc[r]);
}

/* The same of any rows up to ROWS: where these are constant, the sums stay in registers. */
static void multiply_tile(long rows, int ahead, const int8_t *w, const int16_t *x, long inputs, long pairs,
                          float sums[ROWS][TILE])
{
    switch (rows) {
#define CASE(rows) case rows: multiply_rows(rows, 1, w, x, inputs, pairs, sums); break;
        CASE(1) CASE(2) CASE(3)
#if ROWS > 4
        CASE(4) CASE(5) CASE(6) CASE(7)
#endif
#undef CASE
    default:
        if (ahead) multiply_rows(ROWS, 1, w, x, inputs, pairs, sums);
        else multiply_rows(ROWS, 0, w, x, inputs, pairs, sums);
    }
}

/* A matrix of a product, with outputs of 0 behind the last.
 *
 * Of 8 bits: w [outputs / TILE, inputs / 2, TILE, 2], and a float for each output to scale it by.
 *
 * Of 4 bits: w [outputs / TILE, inputs / 8, TILE] words of 32 bits. Bits 4 n to 4 n + 3 of the lower half are
 * input 2 n of eight, of the upper half input 2 n + 1: shifted by 4 n, a word is a pair of 16-bit numbers.
 * scales [outputs / TILE, inputs / SHARED, 2, TILE] are float16, first the scales, then the offsets. */
struct matrix {
    const void *w, *scales;
    long inputs, outputs;
};

/* Activations: numbers x [rows, inputs] times a unit for each row. For weights of 4 bits also the sum of the
 * numbers of each group, of_x [rows, inputs / SHARED], which the group's offset is multiplied by. */
struct numbers {
    const int16_t *x;
    const float *units, *of_x;
};

/* sums [height][TILE] of rows from `row` on by a tile of outputs of 8 bits. Those of at most INPUTS products are
 * exact. */
INLINE void tile_of_8_bits(struct matrix m, struct numbers n, long row, long height, long tile,
                          float sums[ROWS][TILE])
{
    const int8_t *w = (const int8_t *)m.w + tile * TILE * m.inputs;
    for (long i = 0; i < m.inputs; i += INPUTS)
        multiply_tile(height, row == 0, w + i * TILE, n.x + row * m.inputs + i, m.inputs,
                      MIN(m.inputs - i, INPUTS) / 2, sums);
}

/* The same for weights of 4 bits and a constant number of rows. Sums of a group are exact. */
INLINE void multiply_4_bits(int rows, struct matrix m, struct numbers n, long row, long tile,
                           float sums[ROWS][TILE])
{
    long groups = m.inputs / SHARED;
    const uint8_t *w = (const uint8_t *)m.w + tile * TILE * m.inputs / 2;
    const uint16_t *scales = (const uint16_t *)m.scales + tile * groups * 2 * TILE;
    for (long group = 0; group < groups; group++) {
        const int16_t *x = n.x + row * m.inputs + group * SHARED;
        sixteen acc[ROWS];
        for (int r = 0; r < rows; r++) acc[r] = no_sums();
        for (int i = 0; i < SHARED; i += 8, w += 4 * TILE) {
            if (row == 0) _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            sixteen words = words_at(w);
            for (int pair = 0; pair < 4; pair++) {
                sixteen weights = nibbles(words, pair);
                for (int r = 0; r < rows; r++) {
                    int32_t both;
                    __builtin_memcpy(&both, x + r * m.inputs + i + 2 * pair, sizeof both);
                    add_products(&acc[r], weights, both);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            add_scaled(sums[r], acc[r], scales + group * 2 * TILE, n.of_x[(row + r) * groups + group]);
    }
}

static void tile_of_4_bits(struct matrix m, struct numbers n, long row, long height, long tile,
                          float sums[ROWS][TILE])
{
    switch (height) {
#define CASE(rows) case rows: multiply_4_bits(rows, m, n, row, tile, sums); break;
        CASE(1) CASE(2) CASE(3)
#if ROWS > 4
        CASE(4) CASE(5) CASE(6) CASE(7)
#endif
#undef CASE
    default:
        multiply_4_bits(ROWS, m, n, row, tile, sums);
    }
}

/* of_x [groups] = sums of SHARED numbers of x. */
static void add_up(const int16_t *x, float *of_x, long groups)
{
    __m256i ones = _mm256_set1_epi16(1);
    for (long group = 0; group < groups; group++) {
        const __m256i *at = (const __m256i *)(x + group * SHARED);
        __m256i both = _mm256_add_epi32(_mm256_madd_epi16(_mm256_loadu_si256(at), ones),
                                        _mm256_madd_epi16(_mm256_loadu_si256(at + 1), ones));
        of_x[group] = sum((f8)_mm256_cvtepi32_ps(both));
    }
}

/* out [rows, outputs] = x wT + bias, if any, of x [rows, inputs] and a matrix of so many bits, 4 or 8. `space` has
 * rows * (inputs + 2 + inputs / 16) numbers. */
void multiply(long bits, const float *x, const void *w, const void *scales, const float *bias, float *out,
              int16_t *space, long rows, long inputs, long outputs)
{
    float *units = (float *)(space + rows * inputs), *of_x = units + rows;
    const float *scale = bits == 8 ? scales : 0;
    struct matrix m = {w, scales, inputs, outputs};
    struct numbers n = {space, units, of_x};
    quantise(x, space, units, rows, inputs);
    if (bits == 4) add_up(space, of_x, rows * (inputs / SHARED));
    long tiles = (outputs + TILE - 1) / TILE, slab = rows > ROWS ? SLAB * 8 / bits / (TILE * inputs) + 1 : 1;
#pragma omp parallel for num_threads(threads) if (outputs * inputs > PARALLEL)
    for (long first = 0; first < tiles; first += slab)
        for (long row = 0; row < rows; row += ROWS)
            for (long tile = first; tile < MIN(first + slab, tiles); tile++) {
                long height = MIN(rows - row, ROWS), o = tile * TILE, width = MIN(outputs - o, TILE);
                float sums[ROWS][TILE] = {{0.0f}};
                if (bits == 8) tile_of_8_bits(m, n, row, height, tile, sums);
                else tile_of_4_bits(m, n, row, height, tile, sums);
                for (long r = 0; r < height; r++) {
                    float *to = out + (row + r) * outputs + o, unit = units[row + r];
                    for (long c = 0; c < width; c++)
                        to[c] = sums[r][c] * (unit * (scale ? scale[o + c] : 1.0f)) + (bias ? bias[o + c] : 0.0f);
                }
            }
}
