// A plan says what one call of attention does on a GPU: which kernels run, where their keys come from, and what memory they need.
//
// plan_forward and plan_backward decide all of that on the host before anything is allocated or launched, from the arguments and
// from what the device and the build are. They look at no element of a tensor, only at sizes, strides, addresses and which
// arguments are given, so they run without a GPU. A call that no kernel takes is refused here, with an exception that says why.
// What launches a plan decides nothing.
#pragma once

#include "../traits.h"
#include "instances.h"
#include "workspace.h"

namespace dmattn::cuda {

// What the kernels of a call are made for: every GPU from sm80 on, or Hopper (sm90) alone.
enum class Family : int32_t { kNone, kSm80, kSm90 };  // kNone: the call has nothing to compute

// DMATTN_FAMILY. kAuto: Hopper's kernels where they take the call. kSm90 also refuses calls that forward's do not take; for
// backward it means the same as kAuto.
enum class WantedFamily : int32_t { kAuto, kSm80, kSm90 };

struct DeviceProperties {
  int major = 0;                // of the compute capability
  int processors = 0;           // streaming multiprocessors
  int64_t shared_bytes = 0;     // the most shared memory that a block may have
  bool has_tensor_maps = true;  // does the driver have cuTensorMapEncodeTiled?
};

// Where a call runs.
struct Target {
  DeviceProperties device;
  Build build;
  WantedFamily wanted = WantedFamily::kAuto;
};

// Where a kernel's keys come from.
enum class KeySource : int32_t {
  kAll,         // all keys in order; what intervals hide is tested where they are given
  kBlockTable,  // the non-empty tiles of a block mask, and intervals where they are given
  kRange,       // intervals: in order from the first to the last key that a tile of queries sees
  kDirect,      // intervals: each tile of queries looks at all of them; without intervals all keys in order
  kLists,       // intervals: lists of live keys, gathered row by row
  kCompact,     // as kLists, and copies of the live keys side by side for heads that have few
  kQueryLists,  // index lists of blocks, backward: keys in order, and for each tile of them the queries that list some, gathered
  kUnions,      // index lists: for each tile of queries the keys that some of them list, gathered row by row
};

// The scores that a block holds at a time. rows: pairs of a query and a head in Hopper's forward, queries elsewhere.
struct Tile {
  int rows = 0, keys = 0;
};

// Why a plan is what it is: sentences for people, null where there was nothing to choose.
struct Reasons {
  const char* family = nullptr;
  const char* keys = nullptr;
};

// How Hopper's forward cuts the call into tiles, and in which order blocks take them. work_of (sm90/dispatch.cu) makes a
// ForwardWork of it.
struct ForwardSchedule {
  int tiles = 0, queries = 0, log2_heads_per_tile = 0, end_tiles = 0, blocks = 0;
  uint32_t head_groups = 0, section_head_groups = 0;
  bool is_static = false;    // block b has the tiles b, b + blocks, ...
  bool draws_tiles = false;  // blocks draw tiles from a counter, which is zero at the start
};

struct ForwardPlan {
  Family family = Family::kNone;
  Instance instance;
  Tile tile;
  KeySource keys = KeySource::kAll;
  KeyLists lists;                // of kRange, kLists and kCompact, and the order of query tiles beside a block mask
  KeyUnionLists unions;          // of kUnions
  ForwardSchedule schedule;      // of Hopper's kernels
  int64_t compact_capacity = 0;  // live keys that kCompact has room for, per kv head
  Reasons why;

  struct Workspace {
    Region lists, tile_counter;
    Region compact_key, compact_value, compact_key_bias;
    int64_t bytes = 0;
  } workspace;
};

// AttentionParams as the kernels get them: rows are aligned to 16 bytes.
ForwardPlan plan_forward(const AttentionParams& p, const Target& target);

// How many batches and heads run in one launch of Hopper's backward, which adds up gradients in fp32 in memory. A call whose sums
// would need too much memory runs in parts, some batches or kv heads at a time, in the same memory; and where heads of a group
// have to be apart, some query heads of the part at a time.
struct BackwardParts {
  int64_t head_floats = 0, key_floats = 0;  // of a query head and of a kv head
  int64_t batches = 0, kv_heads = 0;        // of a part
  int64_t launch_heads = 0;                 // query heads of a launch, all of the part or fewer
  bool is_one = false;                      // the whole call is one launch
};

// One launch of Hopper's backward. work_of (sm90/dispatch.cu) makes a BackwardWork of it.
struct BackwardSchedule {
  int tiles = 0, heads = 0, shares = 1, blocks = 0;
  uint32_t work_tiles = 0, head_groups = 0, section_head_groups = 0;
  uint32_t static_work_tiles = 0;  // the first work_tiles, which blocks have without drawing
  bool draws_late = false;         // a block draws its next item only when it has asked for all queries of the one before
};

struct BackwardPlan {
  Family family = Family::kNone;
  Instance instance;                    // of Hopper's kernel
  Instance backward_dkdv, backward_dq;  // of the portable kernels; Kernel::kNone where one does not run
  Tile tile, backward_dkdv_tile, backward_dq_tile;
  KeySource keys = KeySource::kAll;
  KeyLists lists;             // of kLists, and the order of query tiles beside a block mask
  KeyUnionLists unions;       // of kUnions
  QueryListPlan query_lists;  // of kQueryLists
  Reasons why;

  bool deterministic = false;
  bool adds_zero_bias = false;  // Hopper: a bias of zeros, for scales and softcaps that only the kernels with a bias take
  bool stores_bias = false;     // Hopper: the kernel writes every element of grad_bias, so nothing clears it
  int64_t padded_queries = 0;   // Sq rounded up to kQueryPadding
  int64_t heads_at_once = 1;    // query heads of a group that a block takes one after the other where keys come in order
  int64_t seen_words = 0;       // of BackwardCall::seen; 0: not needed
  int processors = 0;
  BackwardParts parts;  // of Hopper's kernels
  // Of the portable dkdv kernel: what one block takes one after the other, for gradients in a fixed order.
  int64_t batches_per_block = 1, kv_heads_per_block = 1;
  bool backward_dkdv_takes_lists = false;  // in a deterministic call
  int64_t chained_heads = 1;               // of the portable dq kernel, likewise with index lists (BackwardCall)

  struct Workspace {
    Region zero_bias, lists;
    Region query_sums, key_sums;                   // fp32 sums of gradients
    Region lse2, delta, lse, lse_rest2, row_hash;  // terms of each query
    Region flags;                                  // row_flags and the tile counter, where there are no lists
    Region semaphores, seen;
    int64_t bytes = 0;
  } workspace;
};

// The gradients that biases get, by query head; null data: not wanted.
struct BiasGradients {
  PerHead key_bias, bias;
};

BackwardPlan plan_backward(const BackwardParams& b, const BiasGradients& gradients, const Target& target);

// The launch of Hopper's backward that has so many batches and query heads of a call, and with index lists so many tiles of
// queries.
BackwardSchedule schedule_backward(const BackwardPlan& plan, const AttentionParams& p, int64_t batch, int64_t heads,
                                   int64_t union_tiles = 0);

const char* name_of(Family family);
const char* name_of(KeySource keys);
// Refuses dtypes that no kernel on a GPU takes, decoding included.
void check_kernel_dtype(DType dtype);
// Which kernels a call may have; it refuses what the device or the build has not.
WantedFamily allowed_family(const Target& target);
// The family of that name, null or "": auto.
WantedFamily parse_family(const char* name);

}  // namespace dmattn::cuda
