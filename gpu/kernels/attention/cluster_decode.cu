// Decode attention of few rows: a cluster of thread blocks for each row and KV head (`cluster_decode.py` says why).
//
// Compiled by NVRTC with these constants:
//   GROUP    query heads per KV head, at most 8: the width of a tensor core's tile
//   DIM      columns of a head: 64 or 128
//   CLUSTER  thread blocks of a cluster
//   WARPS    warps of a block
//   FLOAT16  0: bfloat16, 1: float16
//
// The row's keys are cut into chunks of 16. Warp w of block r takes the chunks w * CLUSTER + r, and every
// CLUSTER * WARPS-th after it, from shared memory of its own, so warps wait for nothing but their own copies.
// Then the warps of a block are merged through shared memory, and the blocks through that of the cluster: each
// block adds up its own slice of the output.

typedef unsigned int u32;
typedef unsigned short half_t;  // bits of a bfloat16 or float16

constexpr int CHUNK = 16;
constexpr int THREADS = WARPS * 32;
constexpr int ROW = DIM * 2;                    // bytes of a key, a value or a query
constexpr int TILE = CHUNK * ROW;               // bytes of a chunk's keys, behind which its values lie
constexpr int SPACE = 2 * TILE + 8 * ROW;       // bytes of a warp: a chunk and the queries
constexpr int PIECES = ROW / 16;                // copies of 16 bytes in a row
constexpr int ROWS = 32 / PIECES;               // rows that a warp copies at once
constexpr int SUMS = DIM + 4;                   // floats from a head's result to the next, free of bank conflicts
constexpr int SLICE = GROUP * DIM / CLUSTER;    // floats of the output that a block adds up
constexpr float LOG2E = 1.4426950408889634f;
#define NOTHING (-__int_as_float(0x7f800000))

struct alignas(16) Matrices { u32 a, b, c, d; };
struct alignas(16) Four { float x, y, z, w; };
struct alignas(8) Softmax { float high, total; };  // greatest score in powers of two, and sum relative to it

struct Keys {
    const half_t *k, *v;   // of this KV head
    const int *pages;      // of this row
    long stride;           // from a token to the next
    int page_bits;         // a page has 2 to that many tokens
    int first, length;     // keys that the row sees: from the one up to the other
};

__device__ __forceinline__ u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// Past L1, where data of an earlier step may lie.
__device__ __forceinline__ int load(const int *at) {
    int found;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(found) : "l"(at) : "memory");
    return found;
}

__device__ __forceinline__ void copy(u32 to, const half_t *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this warp's copies, but for those since the last `end_copies` but one.
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
}

// Where piece `piece` of a row lies: rows are permuted, so that eight rows' equal pieces lie in different banks.
__device__ __forceinline__ u32 place(int row, int piece) { return row * ROW + (piece ^ (row & 7)) * 16; }

__device__ __forceinline__ Matrices matrices(u32 at) {
    Matrices m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d) : "r"(at) : "memory");
    return m;
}

__device__ __forceinline__ Matrices transposed(u32 at) {
    Matrices m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.a), "=r"(m.b), "=r"(m.c), "=r"(m.d) : "r"(at) : "memory");
    return m;
}

#if FLOAT16
#define KIND "f16"
#else
#define KIND "bf16"
#endif

// sums [16, 8] += a [16, 16] * b [16, 8]
__device__ __forceinline__ void multiply(float *sums, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 both;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float widened(half_t bits) {
#if FLOAT16
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
#else
    return __int_as_float((u32)bits << 16);
#endif
}

__device__ __forceinline__ float exp2_(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Where the first token of a chunk lies.
__device__ __forceinline__ int place_of(const Keys &keys, int chunk) {
    const int at = chunk * CHUNK, page = at >> keys.page_bits;
    return (load(keys.pages + page) << keys.page_bits) + at - (page << keys.page_bits);
}

enum Which { OLD, NEW, ALL };

// Copies keys or values (`from`) of the chunk that lies at `token` to `to`: those before position `fresh`, those
// from it on, or all. Zeros stand for keys that the row does not see: what lies there may be NaN, which a weight
// of 0 keeps.
template <Which which>
__device__ __forceinline__ void fetch(u32 to, const half_t *from, const Keys &keys, int chunk, int token, int fresh) {
    const int lane = threadIdx.x % 32, row = lane / PIECES, piece = lane % PIECES;
    const long step = keys.stride * ROWS;
    const int at = chunk * CHUNK + row;
    from += (token + row) * keys.stride + piece * 8;
    to += place(row, piece);
#pragma unroll
    for (int i = 0; i < CHUNK; i += ROWS, from += step)
        if (which == ALL || (which == NEW) == (at + i >= fresh))
            copy((to ^ (i % 8 * 16)) + i * ROW, from, at + i >= keys.first && at + i < keys.length);
}

// A step of the online softmax over a chunk whose keys are at `space`. Thread t has head t / 4 (`of_head`): the
// weights of four keys, rounded, and by what the sums before shrink.
struct Weights { u32 low, high; float shrink; };

__device__ __forceinline__ Weights weigh(u32 space, const Matrices *queries, const Keys &keys, int chunk, float scale,
                                         Softmax &of_head) {
    const int lane = threadIdx.x % 32;
    const u32 k = space + place(lane % 8, lane / 8);
    float s[2][2][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[half][0][i] = s[half][1][i] = 0.f;
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {  // two chains of products: one after the other they take twice as long
            const Matrices some = matrices((k ^ (64 * j)) + half * 8 * ROW);
            multiply(s[half][0], queries[j].a, 0, queries[j].b, 0, some.a, some.b);
            multiply(s[half][1], queries[j].c, 0, queries[j].d, 0, some.c, some.d);
        }
    }
    const int at = chunk * CHUNK + 2 * (lane % 4);
    float weights[4], high = of_head.high;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int key = at + 8 * (i / 2) + i % 2;
        const float score = (s[i / 2][0][i % 2] + s[i / 2][1][i % 2]) * scale;
        weights[i] = key >= keys.first && key < keys.length ? score : NOTHING;
        high = fmaxf(high, weights[i]);
    }
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    const float shrink = exp2_(of_head.high - high);
#pragma unroll
    for (int i = 0; i < 4; i++) weights[i] = exp2_(weights[i] - high);
    of_head = {high, of_head.total * shrink + (weights[0] + weights[1]) + (weights[2] + weights[3])};
    return {rounded(weights[0], weights[1]), rounded(weights[2], weights[3]), shrink};
}

// Adds the weighted values of a chunk, which are at `space`, to `sums`: in sums[m] a thread has heads 2 (t % 4) and
// one more, at columns 16 m + t / 4 and 8 further.
__device__ __forceinline__ void add_values(u32 space, const Weights &weights, float (*sums)[4]) {
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const u32 v = space + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const float even = __shfl_sync(~0u, weights.shrink, 8 * quarter);
    const float odd = __shfl_sync(~0u, weights.shrink, 8 * quarter + 4);
#pragma unroll
    for (int m = 0; m < DIM / 16; m++) {
        const Matrices some = transposed(v ^ (32 * m));
        sums[m][0] *= even;
        sums[m][1] *= odd;
        sums[m][2] *= even;
        sums[m][3] *= odd;
        multiply(sums[m], some.a, some.b, some.c, some.d, weights.low, weights.high);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
cluster_decode(const half_t *__restrict__ q, long q_stride, const half_t *__restrict__ k,
               const half_t *__restrict__ v, long stride, long page_bits, const int *__restrict__ table,
               long table_stride, const int *__restrict__ slots, const int *__restrict__ lengths,
               const int *__restrict__ num_rows, const half_t *__restrict__ sinks, half_t *__restrict__ out,
               float scale, long window, long newest) {
    extern __shared__ char spaces[];  // [WARPS][SPACE], aligned to 1,024 bytes
    __shared__ Softmax of_warps[WARPS][8];
    __shared__ Four parts[CLUSTER][SLICE / 4];
    __shared__ Softmax of_parts[CLUSTER][SLICE / 4];
    const int rank = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // The step's tables and all keys but the newest are older than the kernel before: copied while that runs.
    // Loads in a chain cost 0.2 us each: padded rows have a slot and a length, too.
    const int slot = load(slots + row), length = load(lengths + row), rows = load(num_rows);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    const int first = window > 0 && window < length ? length - (int)window : 0, fresh = length - (int)newest;
    const Keys keys = {k + kv_head * DIM, v + kv_head * DIM, table + slot * table_stride,
                       stride, (int)page_bits, first, length};
    const int begin = first / CHUNK, end = (length + CHUNK - 1) / CHUNK, step = CLUSTER * WARPS;
    int chunk = begin + warp * CLUSTER + rank;
    char *const own = spaces + warp * SPACE;
    const u32 of_keys = shared(own), of_values = of_keys + TILE, of_queries = of_values + TILE;
    const bool works = chunk < end && row < rows;
    int next = 0;
    const int nearest = works ? place_of(keys, chunk) : 0;
    if (works) {
        fetch<OLD>(of_keys, keys.k, keys, chunk, nearest, fresh);
        fetch<OLD>(of_values, keys.v, keys, chunk, nearest, fresh);
        if (chunk + step < end) next = place_of(keys, chunk + step);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // The product behind this kernel may now load its weights. At the start it took bandwidth from the keys: 0.5
    // us more; behind the attention it began late: 0.7 us more.
    asm volatile("griddepcontrol.launch_dependents;");

    if (works) {
        const half_t *from = q + row * q_stride + kv_head * GROUP * DIM + lane % PIECES * 8;
#pragma unroll
        for (int head = lane / PIECES; head < GROUP; head += ROWS)
            copy(of_queries + place(head, lane % PIECES), from + head * DIM, true);
        const bool last = chunk * CHUNK + CHUNK > fresh;
        if (last) fetch<NEW>(of_keys, keys.k, keys, chunk, nearest, fresh);
        end_copies();
        if (last) fetch<NEW>(of_values, keys.v, keys, chunk, nearest, fresh);
        end_copies();
        wait_copies();
        Matrices queries[DIM / 32];
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) queries[j] = matrices((of_queries + place(lane % 8, lane / 8)) ^ (64 * j));
        Softmax of_head = {NOTHING, 0.f};
        float sums[DIM / 16][4];
#pragma unroll
        for (int m = 0; m < DIM / 16; m++) sums[m][0] = sums[m][1] = sums[m][2] = sums[m][3] = 0.f;
        // While the one half of a chunk is computed with, the other is under way.
#pragma unroll 1
        while (true) {
            const Weights weights = weigh(of_keys, queries, keys, chunk, scale, of_head);
            chunk += step;
            __syncwarp();
            if (chunk < end) fetch<ALL>(of_keys, keys.k, keys, chunk, next, fresh);
            end_copies();
            wait_copies();
            add_values(of_values, weights, sums);
            __syncwarp();
            if (chunk >= end) break;
            fetch<ALL>(of_values, keys.v, keys, chunk, next, fresh);
            end_copies();
            if (chunk + step < end) next = place_of(keys, chunk + step);
            wait_copies();
        }
        of_head.total += __shfl_xor_sync(~0u, of_head.total, 1);
        of_head.total += __shfl_xor_sync(~0u, of_head.total, 2);
        float *const found = (float *)own + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = 2 * (lane % 4) + i;
            if (head < GROUP)
#pragma unroll
                for (int m = 0; m < DIM / 16; m++) {
                    found[head * SUMS + 16 * m] = sums[m][i];
                    found[head * SUMS + 16 * m + 8] = sums[m][2 + i];
                }
        }
        if (lane % 4 == 0) of_warps[warp][lane / 4] = of_head;
    }
    __syncthreads();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have begun

    if (row >= rows) return;
    const int left = end - begin - rank, active = left <= 0 ? 0 : min((left + CLUSTER - 1) / CLUSTER, WARPS);
    for (int at = threadIdx.x * 4; at < GROUP * DIM; at += THREADS * 4) {
        const int head = at / DIM;
        Softmax merged = {NOTHING, 0.f}, each[WARPS];
        Four sum = {0.f, 0.f, 0.f, 0.f}, found[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            each[w] = of_warps[w][head];
            found[w] = *(const Four *)((const float *)(spaces + w * SPACE) + head * SUMS + at % DIM);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < active) merged.high = fmaxf(merged.high, each[w].high);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w < active) {
                const float share = exp2_(each[w].high - merged.high);
                sum.x += found[w].x * share;
                sum.y += found[w].y * share;
                sum.z += found[w].z * share;
                sum.w += found[w].w * share;
                merged.total += each[w].total * share;
            }
        u32 there, of_there;
        const int owner = at / SLICE, i = at % SLICE / 4;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared(&parts[rank][i])), "r"(owner));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(of_there) : "r"(shared(&of_parts[rank][i])), "r"(owner));
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(there), "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                     ::"r"(of_there), "f"(merged.high), "f"(merged.total) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        const int at = rank * SLICE + i, head = kv_head * GROUP + at / DIM;
        float high = NOTHING, total = 0.f, sum = 0.f;
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) high = fmaxf(high, of_parts[r][i / 4].high);
#pragma unroll
        for (int r = 0; r < CLUSTER; r++) {
            const float share = exp2_(of_parts[r][i / 4].high - high);
            sum += ((const float *)parts[r])[i] * share;
            total += of_parts[r][i / 4].total * share;
        }
        if (sinks) total += exp2_(widened(sinks[head]) * LOG2E - high);
        out[((long)row * gridDim.y + kv_head) * GROUP * DIM + at] = (half_t)rounded(sum / total, 0.f);
    }
}
