// The table of kernel instances, and how one is found in it.
#include "instances.h"

#include <iterator>
#include <sstream>

#include "instance_rows.h"

namespace dmattn::cuda {
namespace {

// The last argument of a row is its traits, KernelTraits<...>, commas and all.
#define DMATTN_ROW(KERNEL, DTYPE, DIM, SMEM_BUDGET, ...) \
  {Kernel::KERNEL, DType::DTYPE, DIM, __VA_ARGS__::kValue, sm80::SmemBudget::SMEM_BUDGET},
constexpr Instance kSm80Forward[] = {DMATTN_ROWS_SM80_FORWARD(DMATTN_ROW)};
constexpr Instance kSm80BackwardDq[] = {DMATTN_ROWS_SM80_BACKWARD_DQ(DMATTN_ROW)};
constexpr Instance kSm80BackwardDkdv[] = {DMATTN_ROWS_SM80_BACKWARD_DKDV(DMATTN_ROW)};
constexpr Instance kSm90Forward[] = {DMATTN_ROWS_SM90_FORWARD(DMATTN_ROW)};
constexpr Instance kSm90Backward[] = {DMATTN_ROWS_SM90_BACKWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(KERNEL, DTYPE, DIM, SMEM_BUDGET, ROWS) \
  {Kernel::KERNEL, DType::DTYPE, DIM, {}, sm80::SmemBudget::SMEM_BUDGET, sm80::DecodeRows::ROWS},
constexpr Instance kSm80Decode[] = {DMATTN_ROWS_SM80_DECODE(DMATTN_ROW)};
constexpr Instance kSm80Step[] = {DMATTN_ROWS_SM80_STEP(DMATTN_ROW)};
#undef DMATTN_ROW

template <int kCount>
constexpr InstanceList list_of(const Instance (&instances)[kCount]) {
  return {instances, kCount};
}

}  // namespace

Build configured_build(bool has_sm90) {
  return {has_sm90,
          {list_of(kSm80Forward), list_of(kSm80BackwardDq), list_of(kSm80BackwardDkdv), list_of(kSm80Decode), list_of(kSm80Step),
           list_of(kSm90Forward), list_of(kSm90Backward)}};
}

const Instance* find_instance(const Build& build, Kernel kernel, const AttentionParams& p, const InstanceTraits& traits,
                              sm80::SmemBudget smem_budget) {
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const Instance* best = nullptr;
  for (const Instance& instance : build.of(kernel)) {
    if (instance.dtype != p.dtype || instance.dim < width || (best && instance.dim > best->dim)) continue;
    if (instance.smem_budget != sm80::SmemBudget::kAny && instance.smem_budget != smem_budget) continue;
    if (instance.traits != traits && instance.traits != kGeneralTraits) continue;
    if (best && instance.dim == best->dim && best->smem_budget == smem_budget && instance.smem_budget != smem_budget) continue;
    if (best && instance.dim == best->dim && best->smem_budget == instance.smem_budget && best->traits == traits) continue;
    best = &instance;
  }
  return best;
}

const Instance* find_instance(const Build& build, Kernel kernel, const DecodeParams& p, sm80::DecodeRows rows) {
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const Instance* best = nullptr;
  for (const Instance& instance : build.of(kernel)) {
    const bool fits = instance.dtype == p.dtype && instance.dim >= width && instance.rows == rows;
    if (fits && (!best || instance.dim < best->dim)) best = &instance;
  }
  return best;
}

const char* name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kSm80Forward: return "sm80 forward";
    case Kernel::kSm80BackwardDq: return "sm80 backward dq";
    case Kernel::kSm80BackwardDkdv: return "sm80 backward dkdv";
    case Kernel::kSm80Decode: return "sm80 decode";
    case Kernel::kSm80Step: return "sm80 step";
    case Kernel::kSm90Forward: return "sm90 forward";
    case Kernel::kSm90Backward: return "sm90 backward";
    case Kernel::kNone: break;
  }
  return "none";
}

const char* name_of(Keys keys) {
  constexpr const char* kNames[] = {"all", "intervals", "range", "in order", "gathered", "union", "query lists", "any"};
  static_assert(std::size(kNames) == static_cast<size_t>(Keys::kAny) + 1);
  return kNames[static_cast<int>(keys)];
}

const char* name_of(Logits logits) {
  constexpr const char* kNames[] = {"scaled", "dropout", "capped", "any"};
  static_assert(std::size(kNames) == static_cast<size_t>(Logits::kAny) + 1);
  return kNames[static_cast<int>(logits)];
}

const char* name_of(Bias bias) {
  constexpr const char* kNames[] = {"none", "key", "pair", "copied"};
  static_assert(std::size(kNames) == static_cast<size_t>(Bias::kCopied) + 1);
  return kNames[static_cast<int>(bias)];
}

std::string name_of(const InstanceTraits& traits) {
  return std::string(name_of(traits.keys)) + "/" + name_of(traits.logits) + "/" + name_of(traits.bias);
}

std::string name_of(sm80::DecodeRows rows) { return rows == sm80::DecodeRows::kFew ? "few rows" : "many rows"; }

const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float64", "float32", "bfloat16", "float16"};
  return kNames[static_cast<int>(dtype)];
}

std::string name_of(const Instance& instance) {
  std::ostringstream text;
  const bool decodes = instance.kernel == Kernel::kSm80Decode || instance.kernel == Kernel::kSm80Step;
  text << name_of(instance.kernel) << "/" << name_of(instance.dtype) << "/" << instance.dim << "/"
       << (decodes ? name_of(instance.rows) : name_of(instance.traits));
  if (instance.smem_budget != sm80::SmemBudget::kAny)
    text << (instance.smem_budget == sm80::SmemBudget::kLarge ? "/large" : "/small");
  return text.str();
}

std::string compiled(const Build& build, std::initializer_list<Kernel> kernels) {
  std::ostringstream text;
  for (const Kernel kernel : kernels) {
    for (const Instance& instance : build.of(kernel)) text << (text.tellp() > 0 ? ", " : "") << name_of(instance);
  }
  return text.str();
}

}  // namespace dmattn::cuda
