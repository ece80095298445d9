// Plans decoding.
#include "plan_decode.h"

#include "../../errors.h"
#include "plan_parts.h"

namespace dmattn::cuda {
namespace {

constexpr int kLightRows = 8;  // up to so many rows a block of its own keeps up with memory

// Keys in a split, by the capacity of the cache and the rows of a key head alone: what else is in the batch must not change a
// sequence's sums. From 32 splits on, splits grow instead.
int split_keys_of(int64_t capacity, int rows) {
  constexpr int kEnoughSplits = 32;
  int64_t keys = rows <= kMostFewRows ? kLeastSplitKeys : 2 * kLeastSplitKeys;
  while (keys < kMostSplitKeys && keys * kEnoughSplits < capacity) keys *= 2;
  return static_cast<int>(keys);
}

// Whether the blocks of a sequence are a cluster, where there may be one: all clusters fit at once, and most multiprocessors have
// a block, unless the cluster is the largest possible one. Its blocks are short, because those of a long cluster of many may
// share multiprocessors while others idle, and because a block alone is slow where there is much to compute. Where there are
// about as many heads as multiprocessors, pairs of blocks fit at once, too, and keep more bytes on their way than single blocks.
bool fits_cluster(const DecodeParams& p, const DecodePlan& plan, int block_splits, int splits, int multiprocessors) {
  constexpr int kShortKeys = 512, kFewParts = 4;
  const auto parts_of = [&](int of_block) { return (splits + of_block - 1) / of_block; };
  const int64_t heads = p.batch * plan.heads, width = std::max(p.head_dim, p.value_dim);
  const int parts = parts_of(block_splits);
  const bool is_pair = parts == 2 && heads * 8 >= int64_t{multiprocessors} * 7;
  if (plan.rows > kMostFewRows || parts < 2 || parts > kMostClusterParts) return false;
  if (heads * parts > int64_t{multiprocessors} * (is_pair ? 2 : 1)) return false;
  const bool is_largest = block_splits == 1 || parts_of(block_splits / 2) > kMostClusterParts;
  if (!is_largest && 2 * heads * parts < multiprocessors) return false;
  const bool is_light = plan.rows <= kLightRows && width > 64 && width <= 128;
  return block_splits * plan.split_keys <= kShortKeys || (is_light && parts <= kFewParts);
}

// How many neighbouring splits a block takes, by shapes and the device; it changes no bits. All of them where that leaves a block
// for most multiprocessors; otherwise as many as a cluster needs where there may be one; otherwise as many as leave the device
// enough blocks.
void group_splits(const DecodeParams& p, int splits, int multiprocessors, bool may_be_cluster, DecodePlan& plan) {
  const int64_t heads = p.batch * plan.heads;
  const auto parts_of = [&](int of_block) { return (splits + of_block - 1) / of_block; };
  const bool takes_all = splits <= kMostBlockSplits && heads * 8 >= int64_t{multiprocessors} * 7;
  // Two blocks fit a multiprocessor: one round of them, or two where there is much to compute.
  const int64_t least = takes_all                 ? 1
                        : plan.rows <= kLightRows ? int64_t{multiprocessors} * 19 / 10
                                                  : int64_t{multiprocessors} * 4;
  const int most = takes_all ? kMostBlockSplits : kMostBlockSplits / 2;
  while (plan.block_splits < most && plan.block_splits < splits && heads * parts_of(2 * plan.block_splits) >= least) {
    plan.block_splits *= 2;
  }
  const int fewest = takes_all && plan.block_splits > 1 ? plan.block_splits / 2 : plan.block_splits;
  for (int block_splits = fewest; may_be_cluster && !plan.is_cluster && block_splits <= kMostBlockSplits; block_splits *= 2) {
    if (fits_cluster(p, plan, block_splits, splits, multiprocessors)) plan.block_splits = block_splits, plan.is_cluster = true;
  }
  plan.parts = parts_of(plan.block_splits);
}

Instance find_kernel(const DecodeParams& p, const DecodePlan& plan, const Target& target, Kernel kernel) {
  const sm80::DecodeRows rows = plan.rows <= kMostFewRows ? sm80::DecodeRows::kFew : sm80::DecodeRows::kMany;
  const Instance* const instance = find_instance(target.build, kernel, p, rows);
  if (!instance) {
    fail("no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim, "; compiled: ", compiled(target.build, {kernel}));
  }
  return *instance;
}

}  // namespace

DecodePlan plan_decode(const DecodeParams& p, const Target& target, Clusters clusters) {
  check_kernel_dtype(p.dtype);
  const bool may_be_cluster = allowed_family(target) != WantedFamily::kSm80 && clusters == Clusters::kMayBe;
  const int64_t all_rows = p.batch * p.heads * p.queries;
  DecodePlan plan;
  if (all_rows == 0) return plan;
  const bool has_lists = p.index.entries.data != nullptr;
  const int64_t heads = has_lists ? p.list_heads : p.kv_heads, keys = has_lists ? p.places : p.capacity;
  plan.queries_apart = has_lists ? static_cast<int>(p.queries) : 1;
  plan.heads = static_cast<int>(heads * plan.queries_apart), plan.sharing = plan.heads / static_cast<int>(p.kv_heads);
  plan.group = static_cast<int>(p.heads / heads), plan.rows = static_cast<int>(plan.group * p.queries / plan.queries_apart);
  plan.split_keys = split_keys_of(keys, plan.rows);
  const int splits = static_cast<int>(std::max<int64_t>(1, tiles_of(keys, plan.split_keys)));
  check(all_rows * splits < int64_t{1} << 31, "query: expected B x H x T x splits below 2^31, got ", p.batch, " x ", p.heads,
        " x ", p.queries, " x ", splits);
  group_splits(p, splits, target.device.processors, may_be_cluster, plan);
  plan.instance = find_kernel(p, plan, target, Kernel::kSm80Decode);
  if (plan.parts > 1 && !plan.is_cluster) {
    const int64_t parts = all_rows * plan.parts;
    plan.workspace.part_out = add_region(plan.workspace.bytes, parts * p.value_dim * 4);
    plan.workspace.part_sums = add_region(plan.workspace.bytes, parts * 2 * 4);
  }
  return plan;
}

DecodePlan plan_step(const DecodeParams& p, const Target& target) {
  DecodePlan plan = plan_decode(p, target);
  const bool is_one_kernel = plan.is_cluster || (plan.rows <= kMostFewRows && plan.parts == 1);
  if (plan.instance.kernel == Kernel::kNone || !is_one_kernel) return {};
  plan.instance = find_kernel(p, plan, target, Kernel::kSm80Step);
  return plan;
}

}  // namespace dmattn::cuda
