// The matrix products of a warpgroup (wgmma) as functions, and what prepares them: registers taken and given, fragments stored,
// tiles described.
//
// Such a product runs on after its instruction. Until wait_products the compiler must neither read the result nor reuse the
// registers of an operand; `pin` tells it so.
#pragma once

#include "../common/device.cuh"

namespace dmattn::cuda {

// The lane, read again at every call, so that what is computed from it is not kept in registers.
__device__ __forceinline__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A value that is the same in all lanes of a warp, in a register that they share: descriptions of tiles are wanted there.
__device__ __forceinline__ uint32_t same_in_lanes(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void store_matrix(uint32_t to, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Four lanes hold a row's columns in pairs; afterwards lane i holds the eight columns 8i..8i+7 of 32.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t give = upper ? x[i] : x[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, give, step);
      if (upper) {
        x[i] = got;
      } else {
        x[i + step] = got;
      }
    }
  }
}

// Descriptions count in units of 16 bytes: a distance in bytes, and that from a tile's first 16 columns to its k-th.
__host__ __device__ constexpr uint32_t step_of(uint32_t bytes) { return bytes >> 4; }
__host__ __device__ constexpr uint32_t step_of_columns(int k, int panel_bytes) {
  return step_of(static_cast<uint32_t>(k / 4 * panel_bytes + k % 4 * 32));
}

// A tile in shared memory is kept as panels of 64 columns: 128 bytes for a row, and 16-byte piece c of row r at piece c ^ (r %
// 8). A description tells the tensor cores its address, the distance of panels and the distance of groups of 8 rows. Only its low
// half depends on the tile; adding 1 to that moves 16 bytes on.
__device__ __forceinline__ uint32_t describe_panels(uint32_t address, int panel_bytes) {
  return (step_of(static_cast<uint32_t>(panel_bytes)) << 16) | step_of(address & 0x3ffff);
}
__device__ __forceinline__ uint64_t complete(uint32_t description) {
  constexpr uint32_t kGroupStride = step_of(1024), kSwizzle128 = 1u << 30;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(description), "n"(kGroupStride | kSwizzle128));
  return whole;
}

// A tile of 16 columns may be kept as rows of 32 bytes: 16-byte piece c of row r at piece c ^ (r / 4 % 2). It begins at a
// multiple of 256 bytes.
inline constexpr int kNarrowRowBytes = 32;
__host__ __device__ constexpr int narrow_place(int row, int piece) {
  return row * kNarrowRowBytes + (piece ^ (row / 4 % 2)) * 16;
}
__device__ __forceinline__ uint32_t describe_narrow(uint32_t address) { return step_of(address & 0x3ffff); }
__device__ __forceinline__ uint64_t complete_narrow(uint32_t description) {
  constexpr uint32_t kGroupStride = step_of(8 * kNarrowRowBytes), kSwizzle32 = 3u << 30;
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(description), "n"(kGroupStride | kSwizzle32));
  return whole;
}

// The fence before the first wgmma of a group; commit ends the group.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to accumulators over this place.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// One step of 16 in the inner dimension of a product. d[n][0..3] are elements in mma.sync's m16n8 layout, 64 rows over the
// warpgroup. from_shared: a and b are described tiles, and the inner dimension runs along their rows; with kAByRows it runs over
// those of a, which then has 64 columns, with kBByRows over those of b; with kSign -1 the product is subtracted. from_registers:
// a is in mma.sync's layout, b is described, and the inner dimension runs over b's rows.
template <class T, int kN>
struct Product;

#define DMATTN_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define DMATTN_D4(n) DMATTN_D(n), DMATTN_D(n + 1), DMATTN_D(n + 2), DMATTN_D(n + 3)
#define DMATTN_D8(n) DMATTN_D4(n), DMATTN_D4(n + 4)
#define DMATTN_D10(n) DMATTN_D8(n), DMATTN_D(n + 8), DMATTN_D(n + 9)
#define DMATTN_D12(n) DMATTN_D8(n), DMATTN_D4(n + 8)
#define DMATTN_D16(n) DMATTN_D8(n), DMATTN_D8(n + 8)
#define DMATTN_LIST16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DMATTN_LIST32                                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31"
#define DMATTN_LIST40 DMATTN_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DMATTN_LIST48 DMATTN_LIST40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define DMATTN_LIST64                                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
  "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define DMATTN_PRODUCT(TYPE, NAME, SIZE, TILES, REGISTERS, R0, R1, R2, R3, R4, R5)                                              \
  template <>                                                                                                                   \
  struct Product<TYPE, SIZE> {                                                                                                  \
    template <bool kAByRows = false, bool kBByRows = kAByRows, int kSign = 1>                                                   \
    static __device__ __forceinline__ void from_shared(float (&d)[SIZE / 8][4], uint64_t a, uint64_t b, int accumulate) {       \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " R2 ", 0; wgmma.mma_async.sync.aligned.m64n" #SIZE "k16.f32." NAME "." NAME \
                   " {" DMATTN_LIST##REGISTERS "}, " R0 ", " R1 ", p, " R5 ", 1, " R3 ", " R4 "; }"                             \
                   : DMATTN_D##TILES(0)                                                                                         \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(kAByRows)), "n"(static_cast<int>(kBByRows)),         \
                     "n"(kSign));                                                                                               \
    }                                                                                                                           \
    static __device__ __forceinline__ void from_registers(float (&d)[SIZE / 8][4], const uint32_t (&a)[4], uint64_t b) {        \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " R5 ", 0; wgmma.mma_async.sync.aligned.m64n" #SIZE "k16.f32." NAME "." NAME \
                   " {" DMATTN_LIST##REGISTERS "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", p, 1, 1, 1; }"                     \
                   : DMATTN_D##TILES(0)                                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));                                               \
    }                                                                                                                           \
  };
DMATTN_PRODUCT(__nv_bfloat16, "bf16", 32, 4, 16, "%16", "%17", "%18", "%19", "%20", "%21")
DMATTN_PRODUCT(__half, "f16", 32, 4, 16, "%16", "%17", "%18", "%19", "%20", "%21")
DMATTN_PRODUCT(__nv_bfloat16, "bf16", 64, 8, 32, "%32", "%33", "%34", "%35", "%36", "%37")
DMATTN_PRODUCT(__half, "f16", 64, 8, 32, "%32", "%33", "%34", "%35", "%36", "%37")
DMATTN_PRODUCT(__nv_bfloat16, "bf16", 80, 10, 40, "%40", "%41", "%42", "%43", "%44", "%45")
DMATTN_PRODUCT(__half, "f16", 80, 10, 40, "%40", "%41", "%42", "%43", "%44", "%45")
DMATTN_PRODUCT(__nv_bfloat16, "bf16", 96, 12, 48, "%48", "%49", "%50", "%51", "%52", "%53")
DMATTN_PRODUCT(__half, "f16", 96, 12, 48, "%48", "%49", "%50", "%51", "%52", "%53")
DMATTN_PRODUCT(__nv_bfloat16, "bf16", 128, 16, 64, "%64", "%65", "%66", "%67", "%68", "%69")
DMATTN_PRODUCT(__half, "f16", 128, 16, 64, "%64", "%65", "%66", "%67", "%68", "%69")

#undef DMATTN_PRODUCT
#undef DMATTN_LIST16
#undef DMATTN_LIST32
#undef DMATTN_LIST40
#undef DMATTN_LIST48
#undef DMATTN_LIST64
#undef DMATTN_D16
#undef DMATTN_D10
#undef DMATTN_D12
#undef DMATTN_D8
#undef DMATTN_D4
#undef DMATTN_D

}  // namespace dmattn::cuda
