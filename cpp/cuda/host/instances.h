// The kernel instances that a build has, as the host knows them: rows of cmake/instances.cmake, without the kernels.
#pragma once

#include <initializer_list>
#include <string>

#include "../sm80/tiles.h"
#include "../traits.h"

namespace dmattn::cuda {

enum class Kernel : int32_t {
  kSm80Forward,
  kSm80BackwardDq,
  kSm80BackwardDkdv,
  kSm80Decode,
  kSm80Step,
  kSm90Forward,
  kSm90Backward,
  kNone
};
inline constexpr int kKernels = static_cast<int>(Kernel::kNone);

struct Instance {
  Kernel kernel = Kernel::kNone;
  DType dtype = DType::kBFloat16;
  int dim = 0;                                            // the largest head size that it takes
  InstanceTraits traits;                                  // of forward and backward
  sm80::SmemBudget smem_budget = sm80::SmemBudget::kAny;  // shared memory that it needs; of Hopper's always kAny
  sm80::DecodeRows rows = sm80::DecodeRows::kFew;         // of kSm80Decode and kSm80Step
};

struct InstanceList {
  const Instance* first = nullptr;
  int64_t count = 0;

  const Instance* begin() const { return first; }
  const Instance* end() const { return first + count; }
};

struct Build {
  bool has_sm90 = false;         // does it have Hopper's kernels at all?
  InstanceList lists[kKernels];  // by Kernel; Hopper's count only where has_sm90

  const InstanceList& of(Kernel kernel) const { return lists[static_cast<int>(kernel)]; }
};

// All instances that this build is configured for; without CUDA those that a build with CUDA would have.
Build configured_build(bool has_sm90);

// The instance of the smallest head size that is large enough; of those the one that fits `smem_budget`, and of those the one
// with these traits rather than the one that serves every call. Null: there is none.
const Instance* find_instance(const Build& build, Kernel kernel, const AttentionParams& p, const InstanceTraits& traits,
                              sm80::SmemBudget smem_budget = sm80::SmemBudget::kAny);

// Of decoding: the instance of the smallest head size that is large enough, for so many rows of queries. Null: there is none.
const Instance* find_instance(const Build& build, Kernel kernel, const DecodeParams& p, sm80::DecodeRows rows);

// For errors and for people.
const char* name_of(Kernel kernel);
const char* name_of(Keys keys);
const char* name_of(Logits logits);
const char* name_of(Bias bias);
std::string name_of(const InstanceTraits& traits);  // "gathered/scaled/key"
std::string name_of(sm80::DecodeRows rows);
const char* name_of(DType dtype);
std::string name_of(const Instance& instance);
// Every instance of these kernels.
std::string compiled(const Build& build, std::initializer_list<Kernel> kernels);

// What dispatch compares: the same kernel, not one that could serve in its place.
inline bool operator==(const Instance& a, const Instance& b) {
  return a.kernel == b.kernel && a.dtype == b.dtype && a.dim == b.dim && a.traits == b.traits && a.smem_budget == b.smem_budget &&
         a.rows == b.rows;
}

}  // namespace dmattn::cuda
