// Thin wrappers around the tensor-core and barrier instructions that the kernels use; PTX, no framework.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace parrot {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A value that all lanes have in common, in a uniform register: the reduction puts it there. Tensor cores and
// bulk copies take their operands from such registers; without, the compiler moves each of them by itself, or
// loops over the lanes.
__device__ inline uint32_t uniform(uint32_t value) { return __reduce_max_sync(0xffffffff, value); }

// 2^x in one instruction; -inf gives 0.
__device__ inline float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Element types: packing of pairs and m16n8k16 products.
template <typename T>
struct Packed;
template <>
struct Packed<__half> {
    static constexpr bool kIsHalf = true;
    static __device__ uint32_t pack(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __half from_float(float value) { return __float2half_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct Packed<__nv_bfloat16> {
    static constexpr bool kIsHalf = false;
    static __device__ uint32_t pack(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }\n" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
    }
}

// Hopper and later, down to the products.

// One lane of the warp: the compiler knows that there is one, and issues what it does without a loop over
// lanes.
__device__ inline bool is_elected() {
    uint32_t elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }\n" : "=r"(elected));
    return elected != 0;
}
// Makes this thread's arrival at a barrier, which also waits for `bytes` of bulk copies.
__device__ inline void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }\n" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// Copies the box of a tensor that begins at (column, row) into shared memory; counts at the barrier.
__device__ inline void copy_box(uint32_t target, const CUtensorMap& map, uint32_t barrier, int column,
                                int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
        "%4}], [%2];\n" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}
// What this thread wrote to shared memory is there for bulk copies and tensor cores.
__device__ inline void fence_shared_writes() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The products' result: its places in the text of an instruction, and its registers, four for each row.
#define PARROT_PLACES_32                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PARROT_PLACES_64                                                               \
    PARROT_PLACES_32                                                                   \
    ", "                                                                               \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PARROT_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PARROT_ROWS_4(i) PARROT_ROW(i), PARROT_ROW(i + 1), PARROT_ROW(i + 2), PARROT_ROW(i + 3)
#define PARROT_ROWS_8 PARROT_ROWS_4(0), PARROT_ROWS_4(4)
#define PARROT_ROWS_16 PARROT_ROWS_8, PARROT_ROWS_4(8), PARROT_ROWS_4(12)

// D += A * B on Hopper's tensor cores: A 64 x 16 in registers, B 16 x 64 or 16 x 128 in shared memory (a
// descriptor), asynchronous.
template <typename T, bool kTransposed>
__device__ inline void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
#define PARROT_WGMMA(TYPE)                                                                \
    asm volatile(                                                                         \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                                        \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" PARROT_PLACES_32 \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }\n"                                 \
        : PARROT_ROWS_8                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0))
    if constexpr (Packed<T>::kIsHalf) {
        PARROT_WGMMA("f16");
    } else {
        PARROT_WGMMA("bf16");
    }
#undef PARROT_WGMMA
}
template <typename T, bool kTransposed>
__device__ inline void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
#define PARROT_WGMMA(TYPE)                                                                 \
    asm volatile(                                                                          \
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" PARROT_PLACES_64 \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }\n"                                  \
        : PARROT_ROWS_16                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0))
    if constexpr (Packed<T>::kIsHalf) {
        PARROT_WGMMA("f16");
    } else {
        PARROT_WGMMA("bf16");
    }
#undef PARROT_WGMMA
}
// The same with A in shared memory too, 64 x 16 of a row-major tile.
template <typename T>
__device__ inline void wgmma(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
#define PARROT_WGMMA(TYPE)                                                                 \
    asm volatile(                                                                          \
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" PARROT_PLACES_64 \
        "}, %64, %65, p, 1, 1, 0, 0; }\n"                                                  \
        : PARROT_ROWS_16                                                                   \
        : "l"(a), "l"(b), "r"(accumulate))
    if constexpr (Packed<T>::kIsHalf) {
        PARROT_WGMMA("f16");
    } else {
        PARROT_WGMMA("bf16");
    }
#undef PARROT_WGMMA
}
#undef PARROT_ROWS_16
#undef PARROT_ROWS_8
#undef PARROT_ROWS_4
#undef PARROT_ROW
#undef PARROT_PLACES_64
#undef PARROT_PLACES_32

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// All products that this warp group has begun, but the last kPending, are in their registers.
template <int kPending>
__device__ inline void finish_products() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
#endif
}
// Describes the columns of 64 elements of a tile: rows of 128 bytes, 128-byte swizzle, 1024 bytes per eight
// rows; columns lie `column_bytes` apart. Adding bytes / 16 moves it.
__device__ inline uint64_t matrix_descriptor(uint32_t address, uint32_t column_bytes) {
    const uint32_t low = uniform(((address & 0x3ffff) >> 4) | (column_bytes >> 4) << 16);
    return uint64_t(low) | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

}  // namespace parrot
