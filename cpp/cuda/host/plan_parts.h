// What plans of forward and backward share.
#pragma once

#include <algorithm>

#include "plan.h"

namespace dmattn::cuda {

inline int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// A head dimension that the library's wide kernels are for.
inline int64_t width_of(const AttentionParams& p) { return std::max(p.head_dim, p.value_dim); }

// Does each query list the keys that it sees?
inline bool has_index_lists(const AttentionParams& p) { return p.mask.index.entries.data; }
inline constexpr const char* kWhyUnions = "each query lists its keys, and neighbours list many of the same";
inline constexpr const char* kWhyQueryLists = "each query lists blocks of keys";

// Refuses dtypes and block masks that no kernel takes.
void check_kernel_inputs(const AttentionParams& p);

// Only Hopper's kernels take more than kMaxLength queries or keys, and only in order: lists have no room for them.
void check_length_without_lists(const AttentionParams& p, bool takes_in_order);

// Would the hardware's tanh times softcap not be exact enough? It also has to be the one that forward has, which takes small
// scales and those below 0 in its general instance.
bool needs_exact_tanh(const AttentionParams& p);

// The traits that the call would ask for without softcap and dropout: kGeneralTraits where it needs an exact tanh.
InstanceTraits traits_without_options(const AttentionParams& p, bool is_gathered);

// Has the call a key_bias and, if its keys come in order, nothing else that an instance of kKeyBiasTraits does not do?
bool has_only_key_bias(const AttentionParams& p);

// Bytes of L2 for the keys of a section. Less without causality: the more keys come from memory, the less power is left for the
// clock.
inline constexpr int64_t kSectionBytes = 32 << 20, kNonCausalSectionBytes = 12 << 20;

// How many head groups of head_group_bytes fit into section_bytes, at least one.
uint32_t head_groups_in_section(int64_t head_groups, int64_t head_group_bytes, int64_t section_bytes);

// The portable instance that serves the call, or the refusal that says what was compiled.
Instance find_portable(const Target& target, Kernel kernel, const AttentionParams& p, const InstanceTraits& traits,
                       sm80::SmemBudget smem_budget = sm80::SmemBudget::kAny);

// Why the portable kernels run a call that Hopper's were not asked for.
const char* reason_without_hopper(const Target& target);

}  // namespace dmattn::cuda
