// Plans attention backward.
//
// A block of the Hopper kernel keeps a tile of keys. It adds up grad_query in fp32 in global memory and, where live keys are
// gathered from more than one list or blocks share the heads of a group, rows of grad_key and grad_value too. In a deterministic
// call blocks do that one after the other, in the order of semaphores. The portable family takes the other calls. Without a mask
// its dkdv kernel adds up grad_query; with gathered keys or a block mask its dq kernel adds up rows of grad_key and grad_value;
// by query lists its dkdv kernel adds up all of them. A deterministic call runs both, each without its adds to global memory.
#include <cmath>

#include "../../errors.h"
#include "key_source.h"
#include "plan_parts.h"
#include "tensor_maps.h"

namespace dmattn::cuda {
namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kEndOfWorkTiles = int64_t{1} << 31;  // so many work_tiles have no numbers

sm90::BackwardShape shape_of(const Instance& instance) {
  return sm90::find_backward_shape(instance.dim, has_options(instance.traits.logits));
}

// Wide heads have a kernel of their own, whose two warpgroups have the same keys.
bool is_wide(const Instance& instance) { return shape_of(instance).keys != sm90::kBackwardKeys; }

const Instance* find_backward(const Build& build, const AttentionParams& given, bool is_gathered) {
  AttentionParams p = given;
  p.scale = 1;  // backward takes any, with a bias (needs_bias)
  InstanceTraits traits = traits_of(p, is_gathered);
  if (p.bias.data) {  // whose kernels take keys in order
    traits = {Keys::kInOrder, p.softcap != 0 ? Logits::kCapped : Logits::kDropout, Bias::kPair};
  } else if (!is_gathered && has_only_key_bias(p)) {
    traits = kKeyBiasTraits;
  } else if (traits == kGeneralTraits) {
    const Keys gathered = has_index_lists(p) ? Keys::kUnion : Keys::kGathered;
    traits = {is_gathered ? gathered : Keys::kInOrder, Logits::kCapped, Bias::kKey};
  }
  return find_instance(build, Kernel::kSm90Backward, p, traits);
}

// Has the call to get a bias, of zeros, before all else? Only the instances with a bias have an exact tanh, for the largest and
// the smallest softcaps, and hide scores after they are scaled, so that -inf stays that with scales up to 0.
bool needs_bias(const AttentionParams& p) {
  constexpr double kLeastScale = 1e-30;
  return !p.bias.data && (needs_exact_tanh(p) || p.scale < kLeastScale);
}

// Is this a call for kernels that gather queries (Keys::kQueryLists)? Blocks of 16 keys are in so many tiles of a trained query
// that the unions of neighbouring queries are faster (research/lab/lists.md).
bool takes_query_lists(const AttentionParams& p, bool deterministic) {
  constexpr int32_t kLeastLog2Block = 5;
  static_assert(1 << kLeastLog2Block >= kListedKeys);
  return has_index_lists(p) && p.mask.index.log2_block >= kLeastLog2Block && !deterministic && !p.bias.data &&
         !p.mask.tiles.data && fits_query_lists(p);
}

// Hopper's instance for such a call; null: the call is not one, or there is no instance.
const Instance* find_query_lists(const Build& build, const AttentionParams& p, bool deterministic) {
  if (!takes_query_lists(p, deterministic)) return nullptr;
  const InstanceTraits traits = {Keys::kQueryLists, traits_of(p, true) == kUnionTraits ? Logits::kScaled : Logits::kCapped,
                                 Bias::kKey};
  const Instance* const found = find_instance(build, Kernel::kSm90Backward, p, traits);
  return found && found->traits == traits ? found : nullptr;
}

// How many heads of a group share their intervals? Keys in order are loaded once for them.
int64_t heads_that_share_intervals(const AttentionParams& p) {
  if (!has_index_lists(p)) return heads_that_share(p, {&p.mask.start, &p.mask.end});
  return heads_that_share(p, {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.index.entries});
}

// How many heads of a group may one launch of a deterministic call take? Those that share their intervals and, where keys are
// gathered or heads wide, their key_bias.
int64_t heads_in_order(const AttentionParams& p, const Instance& instance, bool is_gathered) {
  const int64_t heads = heads_that_share_intervals(p);
  const bool needs_key_bias = is_gathered || is_wide(instance);
  return needs_key_bias ? std::min(heads, heads_that_share(p, {&p.key_bias})) : heads;
}

// Can sums have a fixed order where keys are gathered? A block takes the whole list of a segment and the heads of a group
// together. There have to be so many lists that most of the GPU has work.
bool has_ordered_lists(const AttentionParams& p, const Instance& gathered) {
  constexpr int64_t kFewLists = 32;
  const int64_t lists = segments_at(static_cast<int>(p.query_length), 0) * p.batch * p.kv_heads;
  return properties_of(gathered.traits.keys).gathers && !is_wide(gathered) && lists >= kFewLists;
}

// Where the keys of a call come from. gathered, in_order: the instances for lists and for keys in order.
KeyChoice choose_keys(const BackwardParams& b, const AttentionParams& p, const Target& target, const Instance& gathered,
                      const Instance& in_order) {
  if (p.mask.tiles.data) return {KeySource::kBlockTable, "there is a block mask"};
  if (!gathers(p)) return {KeySource::kAll, "there is no mask, or causality alone"};
  if (p.bias.data) return {KeySource::kAll, "the kernels with a bias take keys in order"};
  if (b.deterministic) {
    if (has_ordered_lists(p, gathered)) return {KeySource::kLists, "there are enough lists to add up in a fixed order"};
    return {KeySource::kAll, "lists are too few, or of the wrong kernel, to be added up in a fixed order"};
  }
  if (heads_that_share_intervals(p) < p.heads / p.kv_heads)
    return {KeySource::kLists, "heads of a group differ in their intervals"};
  if (is_wide(in_order)) return {KeySource::kLists, "keys in order were not measured for wide heads"};
  if (p.mask.is_in_order) return {KeySource::kAll, "the mask says that each query sees neighbouring keys"};
  const int64_t tiles = tiles_of(p.key_length, sm90::kBackwardKeys) * p.batch * p.kv_heads;
  return backward_source({p.query_length, p.key_length, p.most_keys, p.mask.is_causal, tiles, target.device.processors});
}

// Where keys come in order: how many query heads of a group a block takes one after the other. The whole group, whose gradients
// then stay in registers, or fewer, whose gradients are added up in key_sums: where intervals differ, those that share them, and
// where there would be so few work_tiles that blocks would end at different times.
int64_t find_heads_at_once(const AttentionParams& p, const Instance& in_order, int processors) {
  constexpr int64_t kWorkTilesPerProcessor = 3;
  const int64_t group = p.heads / p.kv_heads, most = heads_that_share_intervals(p);
  const int64_t tiles = tiles_of(p.key_length, shape_of(in_order).keys) * p.batch * p.kv_heads;
  for (int64_t parts = group / most; parts < group; ++parts) {
    if (group % parts == 0 && tiles * parts >= kWorkTilesPerProcessor * processors) return group / parts;
  }
  return 1;
}

// Is every live key in one list of the Hopper kernel alone? Then its gradients need no sums in memory. That takes one segment for
// all queries, which for few queries costs less than the sums, and a group of heads that share their mask. The kernel of wide
// heads adds sums.
bool has_one_tile_visit(const AttentionParams& p, const Instance& instance) {
  return heads_that_share_intervals(p) == p.heads / p.kv_heads && p.query_length <= kMostOneList &&
         p.key_length <= kMostOneList && !is_wide(instance);
}

// For sums in a fixed order: batches or kv heads that add to the same elements are taken by one block, one after the other.
struct Together {
  bool batches = false, kv_heads = false;

  Together(const AttentionParams& p, const BiasGradients& gradients) {
    for (const PerHead* grad : {&gradients.key_bias, &gradients.bias}) {
      if (!grad->data) continue;
      batches |= grad->batch_stride == 0 && p.batch > 1;
      kv_heads |= grad->head_divisor > p.heads / p.kv_heads && p.kv_heads > 1;
    }
  }
};

// group_heads: how many of a group one launch may take. With fewer than all keys have sums. Where sums would need more than
// kMostFloats, the call runs in parts; where keys have sums, and those of one kv head's group of heads would need more than
// kMostGroupFloats, some heads of the group run at a time. A fixed order is one within a launch, so batches or heads whose sums
// are added to the same elements run one after the other then.
BackwardParts cut_into_parts(const BackwardParams& b, const BiasGradients& gradients, const BackwardPlan& plan, bool sums_keys,
                             int64_t group_heads) {
  constexpr int64_t kMostFloats = int64_t{1} << 28, kMostGroupFloats = kMostFloats * 4;
  const AttentionParams& p = b.forward;
  const int64_t group = p.heads / p.kv_heads;
  BackwardParts parts;
  parts.head_floats = plan.padded_queries * sum_width(p.head_dim);
  parts.key_floats = sums_keys ? p.key_length * key_sum_width(p) : 0;
  const int64_t floats = group * parts.head_floats + parts.key_floats;
  const int64_t batch_parts = std::clamp<int64_t>(tiles_of(p.batch * p.kv_heads * floats, kMostFloats), 1, p.batch);
  parts.batches = tiles_of(p.batch, batch_parts);
  const int64_t head_parts =
      parts.batches > 1 ? 1 : std::clamp<int64_t>(tiles_of(p.kv_heads * floats, kMostFloats), 1, p.kv_heads);
  parts.kv_heads = tiles_of(p.kv_heads, head_parts);
  if (b.deterministic) {
    const Together together(p, gradients);
    if (together.kv_heads || group_heads < group) parts.kv_heads = 1;
    if (together.batches || parts.kv_heads < p.kv_heads || group_heads < group) parts.batches = 1;
  }
  parts.launch_heads = group_heads < group ? group_heads : parts.kv_heads * group;
  const auto fits = [&] {
    const int64_t heads = parts.launch_heads;
    const bool divides = group % heads == 0 && (heads % plan.heads_at_once == 0 || plan.heads_at_once % heads == 0);
    return divides && heads * parts.head_floats + parts.key_floats <= kMostGroupFloats;
  };
  if (sums_keys && floats > kMostGroupFloats) {
    while (parts.launch_heads > 1 && !fits()) --parts.launch_heads;
  }
  parts.is_one = parts.batches == p.batch && parts.launch_heads == p.heads;
  return parts;
}

// Are rows of keys gathered from lists?
bool gathers_rows(KeySource keys) { return keys == KeySource::kLists || keys == KeySource::kUnions; }

// The call of a launch.
AttentionParams part_of(const AttentionParams& p, const BackwardParts& parts) {
  AttentionParams part = p;
  part.batch = parts.batches, part.heads = parts.launch_heads;
  part.kv_heads = tiles_of(part.heads, p.heads / p.kv_heads);
  return part;
}

// The unions of a launch. A tile of queries is so long that its keys are worth loading and their gradients worth adding. A tile
// of keys visits the chunks of queries that see some of them. Where sums have a fixed order keys ascend, and with several heads a
// group they are worth loading without many queries.
void plan_unions_of_part(const AttentionParams& p, BackwardPlan& plan) {
  constexpr int64_t kQueries = 64, kManyQueries = 32 * kBackwardUnionWords;
  const bool has_few = plan.deterministic && heads_that_share_intervals(p) > 2;
  const int64_t queries = has_few ? std::max<int64_t>(kQueries, plan.tile.rows) : kManyQueries;
  plan.unions = plan_unions(part_of(p, plan.parts), queries, plan.workspace.bytes);
  if (!plan.deterministic) plan.unions.groups = static_cast<int>(queries / plan.tile.rows), plan.unions.chunk = plan.tile.keys;
}

// Terms of each query, and the counters of a call.
void place_terms(const AttentionParams& p, BackwardPlan& plan) {
  BackwardPlan::Workspace& workspace = plan.workspace;
  const int64_t terms = p.batch * p.heads * plan.padded_queries, bytes = terms * kFloatBytes;
  for (Region* region : {&workspace.lse2, &workspace.delta, &workspace.lse, &workspace.lse_rest2}) {
    *region = add_region(workspace.bytes, bytes);
  }
  const bool is_sm90 = plan.family == Family::kSm90;
  if (is_sm90 && p.dropout_seed) workspace.row_hash = add_region(workspace.bytes, bytes);
  if (!plan.lists.has_lists()) workspace.flags = add_region(workspace.bytes, 2 * sizeof(int32_t));
  if (plan.deterministic && (is_sm90 || plan.keys == KeySource::kUnions))
    workspace.semaphores = add_region(workspace.bytes, terms / kSemaphoreQueries * sizeof(int32_t));
  if (plan.lists.elements > 0) workspace.lists = add_region(workspace.bytes, plan.lists.elements * sizeof(int32_t));
}

// Which keys some query of heads_at_once heads sees.
void place_seen(const AttentionParams& p, BackwardPlan& plan) {
  plan.seen_words = tiles_of(p.key_length, 128) * 4;
  const int64_t words = p.batch * p.heads / plan.heads_at_once * plan.seen_words;
  plan.workspace.seen = add_region(plan.workspace.bytes, words * sizeof(uint32_t));
}

// Can tensor copies bring the tensors of a launch?
bool has_tensor_copies(const BackwardParams& b, const Target& target, const BackwardPlan& plan) {
  const AttentionParams& p = b.forward;
  const int queries = plan.tile.rows, keys = plan.tile.keys;
  const int64_t batch = plan.parts.batches, heads = plan.parts.launch_heads, kv_heads = tiles_of(heads, p.heads / p.kv_heads);
  return target.device.has_tensor_maps && is_encodable(map_of_rows(p.query, p.head_dim, p.query_length, heads, batch, queries)) &&
         is_encodable(map_of_rows(b.grad_out, p.value_dim, p.query_length, heads, batch, queries)) &&
         is_encodable(map_of_rows(p.key, p.head_dim, p.key_length, kv_heads, batch, keys)) &&
         is_encodable(map_of_rows(p.value, p.value_dim, p.key_length, kv_heads, batch, keys));
}

// Why Hopper's kernels, of which these are the instances, do not take the call; null: they do.
const char* refusal_of_sm90(const AttentionParams& p, bool deterministic, const Instance* first, const Instance* in_order) {
  constexpr double kMostCapScale = 1e30;  // a product times cap_scale has to be a number
  if (p.key_length == 0 || p.query_length == 0) return "there are no queries or no keys, so gradients are zero";
  if (p.softcap != 0 && !(std::abs(p.scale) <= p.softcap * kMostCapScale)) {
    return "the scale is more than 1e30 times the softcap";
  }
  if (!first || !in_order) return "no kernel for Hopper was built for these head sizes";
  if (has_index_lists(p) && first->traits.keys != Keys::kUnion) {
    return "Hopper's kernels for lists take no bias of single pairs, and no extreme scale or softcap";
  }
  if (!deterministic || !is_wide(*first)) return nullptr;
  // Two warpgroups have the same keys of a wide tile, and nothing orders what they add to the gradient of key_bias. Two numbers
  // have the same sum in either order, those of several heads or batches do not.
  const bool adds_two = p.key_bias.head_divisor == 1 && (p.key_bias.batch_stride != 0 || p.batch == 1);
  if (p.key_bias.data && !adds_two) return "wide heads share a key_bias, whose gradient has no fixed order there";
  // To take such keys in order is slower than the portable kernels, which gather.
  if ((has_index_lists(p) || gathers(p)) && !p.bias.data) return "gathered keys of wide heads have no fixed order";
  return nullptr;
}

// Plans Hopper's kernel; the sentence why not where it does not take the call, null where it does.
const char* plan_sm90(const BackwardParams& b, const BiasGradients& gradients, const Target& target, BackwardPlan& plan) {
  AttentionParams p = b.forward;
  plan.adds_zero_bias = needs_bias(p);
  if (plan.adds_zero_bias) p.bias.data = &plan;  // any address: there will be one
  const Instance* const in_order = find_backward(target.build, p, false);
  const bool has_unions = has_index_lists(p);
  const Instance* const gathered = has_unions || gathers(p) ? find_backward(target.build, p, true) : in_order;
  if (const char* const refusal = refusal_of_sm90(p, b.deterministic, gathered, in_order)) return refusal;
  const Instance* const listed = find_query_lists(target.build, p, b.deterministic);
  const KeyChoice choice = listed       ? KeyChoice{KeySource::kQueryLists, kWhyQueryLists}
                           : has_unions ? KeyChoice{KeySource::kUnions, kWhyUnions}
                                        : choose_keys(b, p, target, *gathered, *in_order);
  const bool is_gathered = gathers_rows(choice.keys), is_fast = !b.deterministic;
  // Beyond kMaxLength there are calls whose keys come in order although they have intervals, or a bias, and no others.
  check_length_without_lists(p, p.bias.data || (gathers(p) && !is_gathered));
  plan.family = Family::kSm90;
  plan.instance = listed ? *listed : is_gathered ? *gathered : *in_order;
  plan.keys = choice.keys;
  plan.tile = {shape_of(plan.instance).queries, shape_of(plan.instance).keys};
  const int64_t group = p.heads / p.kv_heads;
  const int64_t group_heads = is_fast ? group : heads_in_order(p, plan.instance, is_gathered);
  // Blocks that take queries by lists are all at the same head, whose queries and sums then stay in L2.
  plan.heads_at_once = listed ? 1 : is_fast && !is_gathered ? find_heads_at_once(p, *in_order, plan.processors) : group_heads;
  KeyListOptions options;
  options.is_one = is_fast && choice.keys == KeySource::kLists && has_one_tile_visit(p, plan.instance);
  const bool sums_keys = listed || plan.heads_at_once < group || (is_gathered && !options.is_one);
  plan.parts = cut_into_parts(b, gradients, plan, sums_keys, group_heads);
  if (choice.keys == KeySource::kLists) {
    // Long segments: what a tile of keys costs once is a smaller part then. In the longest sequences keys of which many die in
    // their segment come behind those that outlive it, so that few tiles meet all its queries; in others that costs more than it
    // gains. Sums in a fixed order need lists in key order, and many of them.
    options.keeps_live = b.deterministic;
    if (is_fast && p.query_length >= 8192) options.shortest = 1;
    options.by_lifetime = is_fast && p.query_length >= 65536;
    plan.lists = plan_lists(p, options);
  }
  if (!has_tensor_copies(b, target, plan)) return "tensor copies do not take the strides or addresses of the call";
  BackwardPlan::Workspace& workspace = plan.workspace;
  workspace.query_sums =
      add_region(workspace.bytes, plan.parts.batches * plan.parts.launch_heads * plan.parts.head_floats * kFloatBytes);
  if (sums_keys) {
    const int64_t floats = plan.parts.batches * plan.parts.kv_heads * plan.parts.key_floats + key_sum_width(p);
    workspace.key_sums = add_region(workspace.bytes, floats * kFloatBytes);
  }
  if (plan.adds_zero_bias) workspace.zero_bias = add_region(workspace.bytes, p.key_length * kFloatBytes);
  if (!is_gathered && (listed || p.mask.tiles.data || gathers(p))) place_seen(p, plan);
  if (listed) plan.query_lists = plan_query_lists(part_of(p, plan.parts), workspace.bytes);
  if (choice.keys == KeySource::kUnions) plan_unions_of_part(p, plan);
  place_terms(p, plan);
  if (schedule_backward(plan, p, plan.parts.batches, plan.parts.launch_heads, plan.unions.at_once).work_tiles == 0)
    return "a launch has 2^31 tiles or more";
  // Without a mask and causality the kernel meets every pair, so it stores every element of a grad_bias that no two share.
  const bool owns_bias = gradients.bias.data && gradients.bias.head_divisor == 1 && gradients.bias.batch_stride != 0;
  plan.stores_bias = owns_bias && !p.mask.is_causal && !p.mask.tiles.data && !gathers(p);
  plan.why = {"the device has compute capability 9.x, and a kernel for Hopper takes the call", choice.why};
  return nullptr;
}

Tile tile_of(sm80::BackwardShape shape) { return {shape.queries, shape.keys}; }

// Has the dkdv kernel lists in a deterministic call? Heads of a group that see different keys cannot share a gathered tile,
// nor can a key be in different tiles of heads that share a block.
bool backward_dkdv_takes_lists(const AttentionParams& p, const BackwardPlan& plan) {
  const bool shares_blocks = plan.batches_per_block * plan.kv_heads_per_block > 1 && plan.lists.batches * plan.lists.heads > 1;
  return !shares_blocks && plan.lists.head_divisor % (p.heads / p.kv_heads) == 0;
}

void plan_backward_dkdv(const AttentionParams& p, const Target& target, sm80::SmemBudget smem_budget, bool is_gathered,
                        BackwardPlan& plan) {
  const bool has_mask = p.mask.tiles.data || p.mask.start.data || p.mask.end.data;
  const bool is_plain =
      traits_of(p, is_gathered) == kPlainTraits && !has_mask && plan.batches_per_block * plan.kv_heads_per_block == 1;
  plan.backward_dkdv = find_portable(target, Kernel::kSm80BackwardDkdv, p, is_plain ? kDenseTraits : kGeneralTraits, smem_budget);
  plan.backward_dkdv_tile =
      tile_of(sm80::find_backward_shape(sm80::kBackwardDkdvRows, plan.backward_dkdv.dim, plan.backward_dkdv.smem_budget));
}

// The portable dkdv kernel by query lists, in `plan`; false: it does not take the call.
bool plan_portable_query_lists(const AttentionParams& p, const Target& target, sm80::SmemBudget smem_budget, BackwardPlan& plan) {
  constexpr InstanceTraits kTraits = {Keys::kQueryLists, Logits::kScaled, Bias::kNone};
  if (!takes_query_lists(p, plan.deterministic) || traits_of(p, true) != kUnionTraits || p.key_bias.data) return false;
  const Instance* const found = find_instance(target.build, Kernel::kSm80BackwardDkdv, p, kTraits, smem_budget);
  if (!found || found->traits != kTraits) return false;
  plan.backward_dkdv = *found;
  plan.backward_dkdv_tile = tile_of(sm80::find_backward_shape(sm80::kBackwardDkdvRows, found->dim, found->smem_budget));
  return true;
}

void plan_backward_dq(const AttentionParams& p, const Target& target, sm80::SmemBudget smem_budget, bool is_gathered,
                      BackwardPlan& plan) {
  plan.backward_dq = find_portable(target, Kernel::kSm80BackwardDq, p, traits_of(p, is_gathered), smem_budget);
  plan.backward_dq_tile =
      tile_of(sm80::find_backward_shape(sm80::kBackwardDqRows, plan.backward_dq.dim, plan.backward_dq.smem_budget));
}

BackwardPlan plan_sm80(const BackwardParams& b, const BiasGradients& gradients, const Target& target, BackwardPlan plan,
                       const char* why) {
  constexpr int64_t kLargeSharedBytes = 163 * 1024;
  const AttentionParams& p = b.forward;
  check_length_without_lists(p, false);
  const sm80::SmemBudget smem_budget =
      target.device.shared_bytes >= kLargeSharedBytes ? sm80::SmemBudget::kLarge : sm80::SmemBudget::kSmall;
  const bool has_unions = has_index_lists(p) && p.query_length > 0 && p.key_length > 0;
  const bool has_lists = gathers(p) && !has_unions, has_blocks = p.mask.tiles.data;
  plan.family = Family::kSm80;
  plan.heads_at_once = p.heads / p.kv_heads;
  plan.why.family = why;
  BackwardPlan::Workspace& workspace = plan.workspace;
  const bool is_listed = has_unions && plan_portable_query_lists(p, target, smem_budget, plan);
  if (is_listed) {
    plan.keys = KeySource::kQueryLists, plan.query_lists = plan_query_lists(p, workspace.bytes);
    place_seen(p, plan);
    plan.why.keys = kWhyQueryLists;
  } else if (has_unions) {
    plan.keys = KeySource::kUnions, plan.why.keys = kWhyUnions;
  } else if (has_lists) {
    KeyListOptions options;
    options.keeps_live = b.deterministic;
    plan.keys = KeySource::kLists, plan.lists = plan_lists(p, options);
    plan.why.keys = "the portable kernels take intervals by lists alone";
  } else if (has_blocks && p.query_length > 0 && p.key_length > 0) {
    plan.keys = KeySource::kBlockTable, plan.lists = plan_tile_order(p), plan.why.keys = "there is a block mask";
  } else {
    plan.why.keys = "there is no mask, or causality alone";
  }
  if (b.deterministic && has_unions) {
    const Together together(p, gradients);
    plan.chained_heads = together.batches || together.kv_heads ? p.batch * p.heads : p.heads / p.kv_heads;
  }
  if (b.deterministic && !has_unions) {
    const Together together(p, gradients);
    if (together.batches) plan.batches_per_block = p.batch;
    if (together.kv_heads) plan.kv_heads_per_block = p.kv_heads;
    plan.backward_dkdv_takes_lists = has_lists && backward_dkdv_takes_lists(p, plan);
    plan_backward_dkdv(p, target, smem_budget, plan.backward_dkdv_takes_lists, plan);
    plan_backward_dq(p, target, smem_budget, has_lists, plan);
  } else {
    const bool is_gathered = has_unions || has_lists, adds_keys = is_gathered || has_blocks,
               adds_queries = is_listed || !adds_keys;
    if (adds_queries && !is_listed) plan_backward_dkdv(p, target, smem_budget, false, plan);
    if (!adds_queries) plan_backward_dq(p, target, smem_budget, is_gathered, plan);
    if (plan.keys == KeySource::kUnions) plan.unions = plan_unions(p, plan.backward_dq_tile.rows, workspace.bytes);
    const auto add_sums = [&](int64_t rows, int64_t width) {
      return add_region(workspace.bytes, (rows + 1) * width * kFloatBytes);
    };
    if (adds_keys) workspace.key_sums = add_sums(p.batch * p.kv_heads * p.key_length, key_sum_width(p));
    if (adds_queries) workspace.query_sums = add_sums(p.batch * p.heads * p.query_length, sum_width(p.head_dim));
  }
  place_terms(p, plan);
  return plan;
}

}  // namespace

BackwardSchedule schedule_backward(const BackwardPlan& plan, const AttentionParams& p, int64_t batch, int64_t heads,
                                   int64_t union_tiles) {
  const int64_t kv_heads = tiles_of(heads, p.heads / p.kv_heads), group = heads / kv_heads;
  const bool has_unions = plan.keys == KeySource::kUnions;
  const bool is_gathered = gathers_rows(plan.keys), has_key_sums = plan.workspace.key_sums.bytes > 0;
  BackwardSchedule schedule;
  schedule.heads = static_cast<int>(std::min<int64_t>(group, has_unions    ? plan.unions.head_divisor
                                                             : is_gathered ? plan.lists.head_divisor
                                                                           : plan.heads_at_once));
  const int64_t head_groups = batch * heads / schedule.heads;
  int64_t tiles = tiles_of(p.key_length, plan.tile.keys);
  if (has_unions) {
    // So many work tiles that blocks end together.
    const int64_t lists = std::max<int64_t>(union_tiles, 1), wanted = tiles_of(8 * plan.processors, lists * head_groups);
    schedule.shares = plan.deterministic ? 1 : static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(tiles, 1)));
    tiles = lists * schedule.shares;
  } else if (plan.keys == KeySource::kQueryLists) {
    schedule.shares = static_cast<int>(tiles_of(p.query_length, kRangeQueries));
    tiles *= schedule.shares;
  } else if (is_gathered) {
    // Cut each list into enough shares that no block has much more to do than others, even if the call has few segments.
    const int64_t segments = plan.lists.most_lists, few = head_groups * std::min<int64_t>(segments, 4);
    const int64_t rounds = has_key_sums ? 4 : 8;  // without sums a share costs little more than its tiles
    const int64_t shares = std::clamp<int64_t>(rounds * plan.processors / few, 8, std::max<int64_t>(tiles, 8));
    // In a fixed order one block adds all that is added to the queries of a segment.
    schedule.shares = plan.deterministic ? 1 : static_cast<int>(shares);
    tiles = segments * schedule.shares;
  }
  const int64_t work_tiles = tiles * head_groups;
  if (work_tiles >= kEndOfWorkTiles) return schedule;
  schedule.tiles = static_cast<int>(tiles);
  schedule.work_tiles = static_cast<uint32_t>(work_tiles), schedule.head_groups = static_cast<uint32_t>(head_groups);
  // What the keys of a head all meet: its queries, their gradients and their sums.
  const int64_t head_group_bytes = p.query_length * (p.head_dim * 6 + p.value_dim * 2) * schedule.heads;
  schedule.section_head_groups = head_groups_in_section(head_groups, head_group_bytes, kSectionBytes);
  schedule.blocks = static_cast<int>(std::min<int64_t>(work_tiles, plan.processors));
  schedule.static_work_tiles = plan.deterministic ? 0 : static_cast<uint32_t>(schedule.blocks);
  // An item of fewer chunks of queries does not hide the latency of a late draw, and those of lists of several segments, or of
  // ranges of the queries, are short.
  constexpr int64_t kLongWorkTile = 32;
  const bool has_segments = (is_gathered && has_key_sums) || plan.keys == KeySource::kQueryLists;
  schedule.draws_late =
      plan.deterministic || (!has_segments && p.query_length * schedule.heads >= kLongWorkTile * plan.tile.rows);
  return schedule;
}

BackwardPlan plan_backward(const BackwardParams& b, const BiasGradients& gradients, const Target& target) {
  const AttentionParams& p = b.forward;
  check_kernel_inputs(p);
  const WantedFamily allowed = allowed_family(target);
  BackwardPlan plan;
  plan.why.family = "there are no queries and no keys";
  if (p.batch * p.heads * (p.query_length + p.key_length) == 0) return plan;
  plan.deterministic = b.deterministic, plan.processors = target.device.processors;
  plan.padded_queries = tiles_of(p.query_length, kQueryPadding) * kQueryPadding;
  if (allowed == WantedFamily::kSm80) return plan_sm80(b, gradients, target, plan, reason_without_hopper(target));
  BackwardPlan hopper = plan;
  const char* const refusal = plan_sm90(b, gradients, target, hopper);
  return refusal ? plan_sm80(b, gradients, target, plan, refusal) : hopper;
}

}  // namespace dmattn::cuda
