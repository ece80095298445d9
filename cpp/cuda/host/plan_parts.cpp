// What plans of forward and backward share: refusals, and the traits that a call asks for.
#include "plan_parts.h"

#include "../../errors.h"
#include "../../limits.h"

namespace dmattn::cuda {

void check_kernel_inputs(const AttentionParams& p) {
  check_kernel_dtype(p.dtype);
  if (!p.mask.tiles.data) return;
  check(p.mask.tile_q % 128 == 0 && p.mask.tile_k % 128 == 0, "bits: expected tile sizes that are multiples of 128 on CUDA, got ",
        p.mask.tile_q, " x ", p.mask.tile_k);
}

void check_length_without_lists(const AttentionParams& p, bool takes_in_order) {
  check(takes_in_order || (p.query_length <= kMaxLength && p.key_length <= kMaxLength), "query, key: expected lengths up to ",
        kMaxLength, " for a call that does not take its keys in order on Hopper, got Sq=", p.query_length, ", Sk=", p.key_length);
}

bool needs_exact_tanh(const AttentionParams& p) {
  constexpr double kLeastSoftcap = 1e-3, kMostSoftcap = 256, kLeastScale = 1e-6, kMostScale = 1e6;
  return p.softcap != 0 &&
         (p.softcap < kLeastSoftcap || p.softcap > kMostSoftcap || p.scale < kLeastScale || p.scale > kMostScale);
}

InstanceTraits traits_without_options(const AttentionParams& p, bool is_gathered) {
  if (needs_exact_tanh(p)) return kGeneralTraits;
  AttentionParams plain = p;
  plain.softcap = 0, plain.dropout_p = 0;
  return traits_of(plain, is_gathered);
}

bool has_only_key_bias(const AttentionParams& p) {
  return p.key_bias.data && !p.mask.tiles.data && traits_of(p, true) == kGatheredTraits;
}

uint32_t head_groups_in_section(int64_t head_groups, int64_t head_group_bytes, int64_t section_bytes) {
  return static_cast<uint32_t>(std::clamp<int64_t>(section_bytes / std::max<int64_t>(head_group_bytes, 1), 1, head_groups));
}

Instance find_portable(const Target& target, Kernel kernel, const AttentionParams& p, const InstanceTraits& traits,
                       sm80::SmemBudget smem_budget) {
  const Instance* const instance = find_instance(target.build, kernel, p, traits, smem_budget);
  if (!instance) {
    fail("no kernel for head sizes D=", p.head_dim, " and Dv=", p.value_dim,
         "; compiled: ", compiled(target.build, {Kernel::kSm80Forward, Kernel::kSm80BackwardDq, Kernel::kSm80BackwardDkdv}));
  }
  return *instance;
}

const char* reason_without_hopper(const Target& target) {
  if (target.wanted == WantedFamily::kSm80) return "DMATTN_FAMILY=sm80";
  if (!target.build.has_sm90) return "this build has no kernels for Hopper";
  return "the device is not of compute capability 9.x";
}

}  // namespace dmattn::cuda
