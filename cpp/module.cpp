// The Python module `dmattn._C`: facts about this build, and not one op (ops are torch.ops.dmattn.*).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "cuda/host/plan.h"
#include "cuda/host/plan_decode.h"

namespace nb = nanobind;

namespace dmattn::cuda {
namespace {

// The value of an argument of the described call, or what is given for a call that does not have it.
template <class T>
T get(const nb::dict& call, const char* name, T otherwise) {
  return call.contains(name) ? nb::cast<T>(call[name]) : otherwise;
}

// An address that stands for a tensor; plans look at no memory. Tensors are aligned unless `shift` bytes say otherwise.
void* somewhere(int64_t shift = 0) { return reinterpret_cast<void*>(static_cast<uintptr_t>((int64_t{1} << 40) + shift)); }

// A contiguous [B, heads, S, width] tensor.
TensorView view_of(int64_t heads, int64_t length, int64_t width) {
  return {somewhere(), heads * length * width, length * width, width};
}

// A tensor [B|1, heads, elements] for so many heads, contiguous; 0 heads: it is not given.
PerHead per_head(const AttentionParams& p, int64_t heads, bool has_batches, int64_t elements, int64_t shift = 0) {
  if (heads == 0) return {};
  PerHead view;
  view.data = somewhere(shift);
  view.batch_stride = has_batches ? heads * elements : 0;
  view.head_stride = heads == 1 ? 0 : elements;
  view.head_divisor = heads == p.heads ? 1 : heads == p.kv_heads ? p.heads / p.kv_heads : p.heads;
  return view;
}

DType dtype_of(const std::string& name) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw nb::value_error(("dtype: expected float64, float32, bfloat16 or float16, got " + name).c_str());
}

AttentionParams params_of(const nb::dict& call) {
  AttentionParams p;
  p.batch = get<int64_t>(call, "batch", 1), p.heads = get<int64_t>(call, "heads", 1);
  p.kv_heads = get<int64_t>(call, "kv_heads", p.heads);
  p.query_length = get<int64_t>(call, "query_length", 1), p.key_length = get<int64_t>(call, "key_length", p.query_length);
  p.head_dim = get<int64_t>(call, "head_dim", 128), p.value_dim = get<int64_t>(call, "value_dim", p.head_dim);
  p.dtype = dtype_of(get<std::string>(call, "dtype", "bfloat16"));
  p.query = view_of(p.heads, p.query_length, p.head_dim), p.key = view_of(p.kv_heads, p.key_length, p.head_dim);
  p.value = view_of(p.kv_heads, p.key_length, p.value_dim), p.out = view_of(p.heads, p.query_length, p.value_dim);
  p.query.data = somewhere(get<int64_t>(call, "query_shift", 0));
  const bool has_batches = get<bool>(call, "batches_differ", true) && p.batch > 1;
  p.mask.start = p.mask.end = per_head(p, get<int64_t>(call, "interval_heads", 0), has_batches, p.key_length);
  if (const int64_t heads = get<int64_t>(call, "block_heads", 0)) {
    p.mask.tiles = p.mask.rows = p.mask.columns = per_head(p, heads, has_batches, 1);
    p.mask.tile_q = p.mask.tile_k = get<int64_t>(call, "block_size", 128);
  }
  if (const int64_t heads = get<int64_t>(call, "index_heads", 0)) {
    IndexLists& lists = p.mask.index;
    lists.count = lists.row_stride = get<int64_t>(call, "index_count", 64);
    lists.entries = per_head(p, heads, has_batches, p.query_length * lists.count);
    while (int64_t{1} << lists.log2_block < get<int64_t>(call, "index_block", 1)) ++lists.log2_block;
  }
  p.mask.is_causal = get<bool>(call, "is_causal", false), p.mask.is_in_order = get<bool>(call, "is_in_order", false);
  p.most_keys = get<int64_t>(call, "most_keys", 0);
  p.key_bias = per_head(p, get<int64_t>(call, "key_bias_heads", 0), has_batches, p.key_length);
  p.bias = per_head(p, get<int64_t>(call, "bias_heads", 0), has_batches, p.query_length * p.key_length,
                    get<int64_t>(call, "bias_shift", 0));
  p.bias_row_stride = p.key_length;
  p.bias_dtype = dtype_of(get<std::string>(call, "bias_dtype", name_of(p.dtype)));
  p.scale = get<double>(call, "scale", 0.125), p.softcap = get<double>(call, "softcap", 0.0);
  p.dropout_p = get<double>(call, "dropout_p", 0.0);
  if (p.dropout_p > 0) p.dropout_seed = static_cast<const int64_t*>(somewhere());
  return p;
}

// Instances of the head sizes that a build is trimmed to; all of them where `sizes` is empty. They live as long as the vectors.
Build trimmed_build(bool has_sm90, const std::vector<int>& sizes, std::vector<Instance> (&instances)[kKernels]) {
  Build build = configured_build(has_sm90);
  if (sizes.empty()) return build;
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    for (const Instance& instance : build.lists[kernel]) {
      for (const int size : sizes) {
        if (instance.dim == size) instances[kernel].push_back(instance);
      }
    }
    build.lists[kernel] = {instances[kernel].data(), static_cast<int64_t>(instances[kernel].size())};
  }
  return build;
}

Target target_of(const nb::dict& device, std::vector<Instance> (&instances)[kKernels]) {
  Target target;
  target.device.major = get<int>(device, "major", 9), target.device.processors = get<int>(device, "processors", 132);
  target.device.shared_bytes = get<int64_t>(device, "shared_bytes", 227 * 1024);
  target.device.has_tensor_maps = get<bool>(device, "has_tensor_maps", true);
  target.wanted = parse_family(get<std::string>(device, "family", "auto").c_str());
  target.build = trimmed_build(get<bool>(device, "has_sm90", true), get<std::vector<int>>(device, "sizes", {}), instances);
  return target;
}

nb::dict instance_dict(const Instance& instance, const Tile& tile) {
  nb::dict made;
  made["kernel"] = name_of(instance.kernel), made["traits"] = name_of(instance.traits);
  made["dtype"] = name_of(instance.dtype), made["size"] = instance.dim;
  made["rows"] = tile.rows, made["keys"] = tile.keys;
  return made;
}

nb::dict workspace_dict(std::initializer_list<std::pair<const char*, Region>> regions, int64_t bytes) {
  nb::dict made, pieces;
  for (const auto& [name, region] : regions) {
    if (region.bytes > 0) pieces[name] = nb::make_tuple(region.offset, region.bytes);
  }
  made["regions"] = pieces, made["bytes"] = bytes;
  return made;
}

template <class Plan>
nb::dict common_dict(const Plan& plan) {
  constexpr const char* kLists[] = {"none", "lists", "one list", "ranges", "tile order"};
  nb::dict made;
  made["family"] = name_of(plan.family), made["keys"] = name_of(plan.keys);
  made["lists"] = kLists[static_cast<int>(plan.lists.kind)];
  made["why_family"] = plan.why.family ? plan.why.family : "", made["why_keys"] = plan.why.keys ? plan.why.keys : "";
  return made;
}

nb::dict forward_plan(const nb::dict& call, const nb::dict& device) {
  std::vector<Instance> instances[kKernels];
  const ForwardPlan plan = plan_forward(params_of(call), target_of(device, instances));
  nb::dict made = common_dict(plan);
  nb::list kernels;
  if (plan.family != Family::kNone) kernels.append(instance_dict(plan.instance, plan.tile));
  made["kernels"] = kernels;
  made["heads_per_tile"] = 1 << plan.schedule.log2_heads_per_tile, made["blocks"] = plan.schedule.blocks;
  const ForwardPlan::Workspace& w = plan.workspace;
  made["workspace"] = workspace_dict({{"lists", w.lists},
                                      {"union keys", plan.unions.key},
                                      {"union bits", plan.unions.seen},
                                      {"union counts", plan.unions.count},
                                      {"tile_counter", w.tile_counter},
                                      {"compact_key", w.compact_key},
                                      {"compact_value", w.compact_value},
                                      {"compact_key_bias", w.compact_key_bias}},
                                     w.bytes);
  return made;
}

nb::dict backward_plan(const nb::dict& call, const nb::dict& device) {
  std::vector<Instance> instances[kKernels];
  BackwardParams b;
  b.forward = params_of(call);
  const AttentionParams& p = b.forward;
  b.grad_out = view_of(p.heads, p.query_length, p.value_dim);
  b.deterministic = get<bool>(call, "deterministic", false);
  const BackwardPlan plan = plan_backward(b, {p.key_bias, p.bias}, target_of(device, instances));
  nb::dict made = common_dict(plan);
  nb::list kernels;
  if (plan.family == Family::kSm90) kernels.append(instance_dict(plan.instance, plan.tile));
  if (plan.backward_dkdv.kernel != Kernel::kNone) kernels.append(instance_dict(plan.backward_dkdv, plan.backward_dkdv_tile));
  if (plan.backward_dq.kernel != Kernel::kNone) kernels.append(instance_dict(plan.backward_dq, plan.backward_dq_tile));
  made["kernels"] = kernels;
  made["heads_at_once"] = plan.heads_at_once, made["adds_zero_bias"] = plan.adds_zero_bias;
  made["stores_bias"] = plan.stores_bias;
  made["parts"] = nb::make_tuple(plan.parts.batches, plan.parts.kv_heads, plan.parts.launch_heads);
  const BackwardPlan::Workspace& w = plan.workspace;
  made["workspace"] = workspace_dict({{"query_sums", w.query_sums},
                                      {"key_sums", w.key_sums},
                                      {"zero_bias", w.zero_bias},
                                      {"seen", w.seen},
                                      {"lse2", w.lse2},
                                      {"delta", w.delta},
                                      {"lse", w.lse},
                                      {"lse_rest2", w.lse_rest2},
                                      {"row_hash", w.row_hash},
                                      {"flags", w.flags},
                                      {"semaphores", w.semaphores},
                                      {"lists", w.lists},
                                      {"union keys", plan.unions.key},
                                      {"union bits", plan.unions.seen},
                                      {"union counts", plan.unions.count},
                                      {"query lists", plan.query_lists.entries},
                                      {"query list places", plan.query_lists.places},
                                      {"query list begins", plan.query_lists.begin}},
                                     w.bytes);
  return made;
}

nb::dict decode_plan(const nb::dict& call, const nb::dict& device) {
  std::vector<Instance> instances[kKernels];
  const Target target = target_of(device, instances);
  DecodeParams p;
  p.batch = get<int64_t>(call, "batch", 1), p.heads = get<int64_t>(call, "heads", 1);
  p.kv_heads = get<int64_t>(call, "kv_heads", p.heads);
  p.queries = get<int64_t>(call, "query_length", 1), p.capacity = get<int64_t>(call, "key_length", 1);
  p.head_dim = get<int64_t>(call, "head_dim", 128), p.value_dim = get<int64_t>(call, "value_dim", p.head_dim);
  p.dtype = dtype_of(get<std::string>(call, "dtype", "bfloat16"));
  static int32_t nothing = 0;
  p.places = get<int64_t>(call, "listed_keys", 0), p.list_heads = get<int64_t>(call, "list_heads", p.kv_heads);
  if (p.places > 0) p.index.entries.data = &nothing;
  const DecodePlan decode =
      plan_decode(p, target, get<bool>(device, "has_room_for_clusters", true) ? Clusters::kMayBe : Clusters::kNever);
  const DecodePlan step = get<bool>(call, "takes_token", false) ? plan_step(p, target) : DecodePlan{};
  const DecodePlan& plan = step.instance.kernel != Kernel::kNone ? step : decode;
  nb::dict made;
  made["kernel"] = name_of(plan.instance.kernel), made["rows"] = name_of(plan.instance.rows), made["size"] = plan.instance.dim;
  made["split_keys"] = plan.split_keys, made["block_splits"] = plan.block_splits;
  made["parts"] = plan.parts, made["is_cluster"] = plan.is_cluster;
  made["workspace"] =
      workspace_dict({{"part_out", plan.workspace.part_out}, {"part_sums", plan.workspace.part_sums}}, plan.workspace.bytes);
  return made;
}

}  // namespace
}  // namespace dmattn::cuda

NB_MODULE(_C, m) {
  m.doc() = "Facts about this build of dmattn.";
  m.def(
      "build_info",
      [] {
        nb::dict info;
        info["version"] = DMATTN_VERSION;
        info["built_with_torch"] = DMATTN_TORCH_BUILD_VERSION;
        info["stable_abi_target"] = "2.10";
        info["cuda"] = DMATTN_CUDA_VERSION;
        info["cuda_archs"] = DMATTN_CUDA_ARCHS;
        info["cuda_choice"] = DMATTN_CUDA_CHOICE;
        info["cpu_levels"] = DMATTN_CPU_LEVELS;
        info["compiler"] = DMATTN_COMPILER;
        return info;
      },
      "Version, torch and CUDA this library was built with; lists are separated by commas.");
  m.def("forward_plan", &dmattn::cuda::forward_plan, nb::arg("call"), nb::arg("device"),
        "What attention forward would do on a GPU with the described call: dmattn.plan says what may be described.");
  m.def("backward_plan", &dmattn::cuda::backward_plan, nb::arg("call"), nb::arg("device"),
        "What attention backward would do on a GPU with the described call.");
  m.def("decode_plan", &dmattn::cuda::decode_plan, nb::arg("call"), nb::arg("device"),
        "What decoding would do on a GPU with the described call.");
}
