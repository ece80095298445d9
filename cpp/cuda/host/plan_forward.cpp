// Plans attention forward.
#include "../../errors.h"
#include "key_source.h"
#include "plan_parts.h"
#include "tensor_maps.h"

namespace dmattn::cuda {
namespace {

// Head groups of a section where tiles meet few keys. Then the keys of all tiles at work have to fit into L2 together, and fewer
// head groups at a time have fewer keys.
constexpr uint32_t kLocalSectionHeadGroups = 4;

// Forward's chunks of wider heads are short where keys come in order.
constexpr int kMostRangeDim = 128;

constexpr int64_t kEndOfTiles = int64_t{1} << 31;  // the number of a tile has to be less

sm90::ForwardShape shape_of(const Instance& instance) { return sm90::find_forward_shape(instance.dim, instance.traits); }

// Can tensor copies bring the bias of the call, are its keys all seen or causal, and is dropout the only option? Tensor copies
// take no stride of 0, so rows must not be broadcast; heads and batches may be. Chunks of a bias begin and end at multiples of 8
// keys, so what a tile sees by causality has to end there too: a key behind that may hold NaN, which a weight of 0 does not hide.
// Each head has a tile of its own there, which few queries would leave mostly empty.
bool has_copied_bias(const AttentionParams& p, bool is_gathered) {
  constexpr int64_t kLeastCopiedBiasQueries = 128;
  if (!p.bias.data || p.softcap != 0 || p.mask.tiles.data || gathers(p)) return false;
  AttentionParams rest = p;
  rest.bias = {};
  const bool ends_at_pieces = !p.mask.is_causal || (p.key_length - p.query_length) % 8 == 0;
  return traits_without_options(rest, is_gathered) == kPlainTraits && p.bias_dtype == p.dtype &&
         reinterpret_cast<uintptr_t>(p.bias.data) % 16 == 0 &&
         (p.bias_row_stride | p.bias.batch_stride | p.bias.head_stride) % 8 == 0 &&
         (p.bias_row_stride > 0 || p.query_length == 1) && ends_at_pieces &&
         (p.heads == p.kv_heads || p.query_length >= kLeastCopiedBiasQueries);
}

// The instance that takes the keys of the call in order, although it has a key_bias, and intervals or not; null: there is none.
const Instance* find_key_bias(const Build& build, const AttentionParams& p) {
  if (!has_only_key_bias(p)) return nullptr;
  const Instance* const instance = find_instance(build, Kernel::kSm90Forward, p, kKeyBiasTraits);
  return instance && instance->traits == kKeyBiasTraits ? instance : nullptr;
}

// Have documents so many queries that few tiles have those of two? Such a tile meets the keys of both, and the more so the more
// rows it has. With all tokens as queries tiles of 192 rows were 7 % faster than those of 128, with a quarter of them 5 % slower.
bool has_long_runs(const AttentionParams& p) { return 2 * p.query_length >= p.key_length; }

const Instance* find_forward(const Build& build, const AttentionParams& p, bool is_gathered) {
  if (const Instance* const instance = is_gathered ? nullptr : find_key_bias(build, p)) return instance;
  InstanceTraits traits = traits_of(p, is_gathered);
  if (has_copied_bias(p, is_gathered)) {
    traits = {Keys::kAll, Logits::kDropout, Bias::kCopied};
  } else if (p.softcap != 0 || p.dropout_p != 0) {
    traits = traits_without_options(p, is_gathered);
    if (traits == kPlainTraits && p.mask.tiles.data) traits = kGeneralTraits;
    if (traits == kPlainTraits) traits.keys = Keys::kAll;
    if (traits != kGeneralTraits) traits.logits = Logits::kCapped;
  }
  if (traits == kPlainTraits && gathers(p) && has_long_runs(p)) traits.keys = Keys::kRange;
  const bool is_dense = traits == kPlainTraits && !p.mask.tiles.data && !gathers(p);
  const Instance* const dense = is_dense ? find_instance(build, Kernel::kSm90Forward, p, kDenseTraits) : nullptr;
  const bool has_dense = dense && dense->traits == kDenseTraits;
  return has_dense ? dense : find_instance(build, Kernel::kSm90Forward, p, traits);
}

// Can compact keys take the place of gathered ones, and are they likely to help? All heads of a group have to share the mask and
// key_bias. Without causality the live keys are often the same for all queries. Few queries are not worth the copies.
bool may_compact(const AttentionParams& p) {
  constexpr int64_t kLeastCompactQueries = 8192;
  const int64_t group = p.heads / p.kv_heads;
  if (p.mask.is_causal || traits_of(p, true) != kGatheredTraits) return false;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.key_bias}) {
    if (row->data && row->head_divisor % group != 0) return false;
  }
  return p.query_length * group >= kLeastCompactQueries;
}

// An instance of Hopper's and where its keys come from; no instance: there is none.
struct InstanceChoice {
  const Instance* instance;
  KeySource keys;
  const char* why = nullptr;
};

// Where the keys of a call with intervals come from, and no block mask, which the `gathered` instance takes.
InstanceChoice choose_for_intervals(const AttentionParams& p, const Target& target, const Instance* gathered) {
  KeyChoice choice = {KeySource::kLists, "the kernel for these options takes intervals by lists alone"};
  const Instance* const in_order = find_key_bias(target.build, p);
  if (gathered->traits == kGatheredTraits) {
    const int64_t tiles = tiles_of(p.batch * p.heads * p.query_length, shape_of(*gathered).rows());
    // Without a key_bias, and in long calls with D=64, lists are no slower, however many keys a query sees. Where keys are known
    // to come in order their number decides nothing.
    const bool counts = in_order && !p.mask.is_in_order && (gathered->dim > 64 || p.key_length <= 8192);
    choice = forward_source(
        {p.query_length, p.key_length, counts ? p.most_keys : 0, p.mask.is_causal, tiles, target.device.processors});
    if (choice.keys == KeySource::kDirect && gathered->dim > kMostDirectDim) {
      choice = {KeySource::kLists, "heads are too wide for the kernel that looks at all keys"};
    }
  }
  if (choice.keys == KeySource::kAll) return {in_order, KeySource::kAll, choice.why};
  if (choice.keys == KeySource::kDirect) return {gathered, KeySource::kDirect, choice.why};
  // With a softcap or dropout keys are gathered even under a sliding window: no instance of ranges has them.
  if (p.mask.is_in_order && traits_of(p, false) == kPlainTraits) {
    const Instance* const ranged = find_forward(target.build, p, false);
    const bool takes_ranges = ranged && (ranged->traits.keys == Keys::kRange || ranged->traits.keys == Keys::kInOrder);
    if (takes_ranges && ranged->dim <= kMostRangeDim) {
      return {ranged, KeySource::kRange, "the mask says that each query sees neighbouring keys"};
    }
  }
  if (may_compact(p)) {
    return {gathered, KeySource::kCompact, "without causality live keys are often the same for all queries"};
  }
  return {gathered, KeySource::kLists, choice.why};
}

InstanceChoice choose_instance(const AttentionParams& p, const Target& target) {
  if (has_index_lists(p)) {
    const Instance* const listed = p.bias.data ? nullptr : find_forward(target.build, p, true);
    return {listed && listed->traits.keys == Keys::kUnion ? listed : nullptr, KeySource::kUnions, kWhyUnions};
  }
  const bool has_blocks = p.mask.tiles.data;
  const Instance* const gathered =
      gathers(p) || p.key_bias.data ? find_forward(target.build, p, true) : find_forward(target.build, p, false);
  if (gathered && gathers(p)) return choose_for_intervals(p, target, gathered);
  // With a key_bias and no intervals the gathered instance takes keys in order for head sizes without kKeyBiasTraits.
  const bool takes_in_order = gathered && gathered->traits == kGatheredTraits && !has_blocks && !find_key_bias(target.build, p);
  if (takes_in_order) {
    return {gathered, KeySource::kDirect, "there are no intervals, so the kernel that gathers takes all keys in order"};
  }
  const Instance* const in_order = gathered && p.key_bias.data ? find_forward(target.build, p, false) : gathered;
  if (has_blocks) return {in_order, KeySource::kBlockTable, "there is a block mask"};
  return {in_order, KeySource::kAll, "there is no mask, or causality alone"};
}

// Heads of a group share their keys, so they go into one tile, unless masks or key_bias tell them apart.
int find_log2_heads_per_tile(const AttentionParams& p, int rows) {
  const int64_t group = p.heads / p.kv_heads;
  int shift = 0;
  while (rows % (2 << shift) == 0 && group % (int64_t{2} << shift) == 0) ++shift;
  for (const PerHead* row : {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.index.entries, &p.key_bias}) {
    while (row->data && row->head_divisor % (int64_t{1} << shift) != 0) --shift;
  }
  return shift;
}

// Numbers the tiles of the call; false where there are too many.
bool schedule_tiles(const AttentionParams& p, const Target& target, ForwardPlan& plan) {
  ForwardSchedule& schedule = plan.schedule;
  const int rows = plan.tile.rows;
  schedule.log2_heads_per_tile = plan.instance.traits.bias == Bias::kCopied ? 0 : find_log2_heads_per_tile(p, rows);
  const int64_t heads_per_tile = int64_t{1} << schedule.log2_heads_per_tile, queries = rows >> schedule.log2_heads_per_tile,
                head_groups = p.batch * p.heads / heads_per_tile, tiles = tiles_of(p.query_length, queries),
                work_tiles = tiles * head_groups;
  if (work_tiles >= kEndOfTiles) return false;
  schedule.queries = static_cast<int>(queries), schedule.tiles = static_cast<int>(tiles);
  schedule.head_groups = static_cast<uint32_t>(head_groups);
  const int64_t head_group_bytes = p.key_length * (p.head_dim + p.value_dim) * 2 * heads_per_tile * p.kv_heads / p.heads;
  const bool has_unions = plan.keys == KeySource::kUnions;
  const bool is_local = has_unions || (plan.keys != KeySource::kAll && gathers(p));  // tiles of few keys
  const int64_t section_bytes = p.mask.is_causal ? kSectionBytes : kNonCausalSectionBytes;
  schedule.section_head_groups = is_local ? std::min(kLocalSectionHeadGroups, schedule.head_groups)
                                          : head_groups_in_section(head_groups, head_group_bytes, section_bytes);
  schedule.end_tiles = is_local && !has_unions ? schedule.tiles / 8 : 0;
  const int64_t blocks = std::min<int64_t>(work_tiles, target.device.processors);
  schedule.blocks = static_cast<int>(blocks);
  // Where there is no counter that another kernel has cleared, and tiles are short, clearing one takes longer than blocks would
  // wait for each other.
  constexpr int64_t kFewRounds = 32;
  schedule.is_static = plan.keys == KeySource::kDirect && is_local && work_tiles <= kFewRounds * blocks;
  schedule.draws_tiles = work_tiles > blocks && !schedule.is_static;
  return true;
}

// Can tensor copies bring the tensors of the call, whose addresses and strides the caller chose?
bool has_tensor_copies(const AttentionParams& p, const Target& target, const ForwardPlan& plan) {
  const int64_t heads_per_tile = int64_t{1} << plan.schedule.log2_heads_per_tile;
  const int tile_heads = static_cast<int>(heads_per_tile);
  return target.device.has_tensor_maps &&
         is_encodable(map_of_groups(p.query, p.head_dim, p, heads_per_tile, tile_heads, plan.schedule.queries)) &&
         is_encodable(map_of_rows(p.key, p.head_dim, p.key_length, p.kv_heads, p.batch, plan.tile.keys)) &&
         is_encodable(map_of_rows(p.value, p.value_dim, p.key_length, p.kv_heads, p.batch, plan.tile.keys)) &&
         is_encodable(map_of_groups(p.out, p.value_dim, p, heads_per_tile, 1, 1)) &&
         (plan.instance.traits.bias != Bias::kCopied || is_encodable(map_of_bias(p, plan.tile.rows)));
}

// Makes room for copies of a quarter of the keys, at most kMostCompact, so that they stay small beside key and value. Heads with
// more live keys gather them.
void place_compact_keys(const AttentionParams& p, ForwardPlan& plan) {
  constexpr int64_t kMostCompact = 8192;
  plan.compact_capacity = std::min(tiles_of(p.key_length, 4), kMostCompact);
  const int64_t rows = p.batch * p.kv_heads * plan.compact_capacity;
  ForwardPlan::Workspace& workspace = plan.workspace;
  workspace.compact_key = add_region(workspace.bytes, rows * p.head_dim * 2);
  workspace.compact_value = add_region(workspace.bytes, rows * p.value_dim * 2);
  if (p.key_bias.data) workspace.compact_key_bias = add_region(workspace.bytes, rows * 4);
}

void place_lists(ForwardPlan& plan) {
  if (plan.lists.elements > 0) plan.workspace.lists = add_region(plan.workspace.bytes, plan.lists.elements * 4);
}

// Plans Hopper's kernel; the sentence why not where it does not take the call, null where it does.
const char* plan_sm90(const AttentionParams& p, const Target& target, ForwardPlan& plan) {
  if (p.key_length == 0) return "there are no keys, so the result is zero";
  const InstanceChoice choice = choose_instance(p, target);
  if (!choice.instance) {
    return has_index_lists(p) ? "Hopper's kernels for lists take no bias of single pairs, and no extreme scale or softcap"
                              : "no kernel for Hopper was built for these head sizes";
  }
  plan.family = Family::kSm90;
  plan.instance = *choice.instance, plan.keys = choice.keys;
  plan.tile = {shape_of(plan.instance).rows(), shape_of(plan.instance).keys};
  if (!schedule_tiles(p, target, plan)) return "the call has 2^31 tiles or more";
  if (!has_tensor_copies(p, target, plan)) return "tensor copies do not take the strides or addresses of the call";
  if (plan.keys == KeySource::kRange) {
    plan.lists = plan_ranges(p, plan.tile.rows);
  } else {
    check_length_without_lists(p, false);
  }
  if (plan.keys == KeySource::kLists || plan.keys == KeySource::kCompact) {
    KeyListOptions options;
    options.joins = plan.keys == KeySource::kCompact, options.lengthens = true;
    plan.lists = plan_lists(p, options);
  }
  place_lists(plan);
  if (plan.keys == KeySource::kCompact) place_compact_keys(p, plan);
  if (plan.keys == KeySource::kUnions) {
    plan.unions = plan_unions(p, plan.schedule.queries, plan.workspace.bytes);
    const int consumers = shape_of(plan.instance).consumers;  // each of which has its own queries
    if (plan.schedule.queries % consumers == 0) plan.unions.groups = consumers, plan.unions.chunk = plan.tile.keys;
  }
  const bool has_counter = plan.lists.kind != KeyLists::Kind::kNone;
  if (plan.schedule.draws_tiles && !has_counter) plan.workspace.tile_counter = add_region(plan.workspace.bytes, sizeof(int32_t));
  plan.why = {"the device has compute capability 9.x, and a kernel for Hopper takes the call", choice.why};
  return nullptr;
}

ForwardPlan plan_sm80(const AttentionParams& p, const Target& target, const char* why) {
  check_length_without_lists(p, false);
  ForwardPlan plan;
  plan.family = Family::kSm80;
  const bool has_unions = has_index_lists(p) && p.key_length > 0;
  plan.instance = find_portable(target, Kernel::kSm80Forward, p, traits_of(p, has_unions || gathers(p)));
  const sm80::ForwardShape shape = sm80::find_forward_shape(plan.instance.dim, plan.instance.traits);
  plan.tile = {shape.queries, shape.keys};
  plan.why.family = why;
  if (has_unions) {
    plan.keys = KeySource::kUnions, plan.why.keys = kWhyUnions;
    plan.unions = plan_unions(p, plan.tile.rows, plan.workspace.bytes);
  } else if (gathers(p)) {
    KeyListOptions options;
    options.lengthens = true;
    plan.keys = KeySource::kLists, plan.lists = plan_lists(p, options);
    plan.why.keys = "the portable kernels take intervals by lists alone";
  } else if (p.mask.tiles.data && p.key_length > 0) {
    plan.keys = KeySource::kBlockTable, plan.lists = plan_tile_order(p), plan.why.keys = "there is a block mask";
  } else {
    plan.why.keys = "there is no mask, or causality alone";
  }
  place_lists(plan);
  return plan;
}

}  // namespace

ForwardPlan plan_forward(const AttentionParams& p, const Target& target) {
  check_kernel_inputs(p);
  const WantedFamily allowed = allowed_family(target);
  ForwardPlan plan;
  plan.why.family = "there are no queries";
  if (p.batch * p.heads * p.query_length == 0) return plan;
  if (allowed == WantedFamily::kSm80) return plan_sm80(p, target, reason_without_hopper(target));
  const char* const refusal = plan_sm90(p, target, plan);
  if (!refusal) return plan;
  // Without keys the result is zero in any family.
  check(allowed == WantedFamily::kAuto || p.key_length == 0, "DMATTN_FAMILY: sm90 has no kernel for this call (", refusal,
        "): head sizes D=", p.head_dim, " and Dv=", p.value_dim, " (use auto)");
  return plan_sm80(p, target, refusal);
}

}  // namespace dmattn::cuda
