// Picks an instance of the sm80 kernels from flat tables, which cmake/instances.cmake generates.
//
// A table may leave out a special instance: the general one is taken in its place.
#include <sstream>

#include "backward_keys.cuh"
#include "backward_queries.cuh"
#include "decode.cuh"
#include "dispatch.h"
#include "forward.cuh"
#include "sm80_instances.h"

namespace dmattn::cuda::sm80 {
namespace {

template <class Call>
struct Instance {
  DType dtype;
  int dim;
  Variant variant;
  Room room;
  cudaError_t (*launch)(const Call&, cudaStream_t);
};

#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, ROOM) \
  {DType::DTYPE, DIM, Variant::VARIANT, Room::ROOM, launch_forward<TYPE, DIM, Variant::VARIANT>},
constexpr Instance<ForwardCall> kForward[] = {DMATTN_SM80_FORWARD(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, ROOM) \
  {DType::DTYPE, DIM, Variant::VARIANT, Room::ROOM, launch_query_major<TYPE, DIM, Variant::VARIANT, Room::ROOM>},
constexpr Instance<BackwardCall> kQueryMajor[] = {DMATTN_SM80_QUERY_MAJOR(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, VARIANT, ROOM) \
  {DType::DTYPE, DIM, Variant::VARIANT, Room::ROOM, launch_key_major<TYPE, DIM, Variant::VARIANT, Room::ROOM>},
constexpr Instance<BackwardCall> kKeyMajor[] = {DMATTN_SM80_KEY_MAJOR(DMATTN_ROW)};
#undef DMATTN_ROW

template <class Call>
struct DecodeInstance {
  DType dtype;
  int dim;
  DecodeRows rows;
  cudaError_t (*launch)(const Call&, cudaStream_t);
};
#define DMATTN_ROW(DTYPE, TYPE, DIM, ROWS, ROOM) \
  {DType::DTYPE, DIM, DecodeRows::ROWS, launch_decode<TYPE, DIM, DecodeRows::ROWS, DecodeCall>},
constexpr DecodeInstance<DecodeCall> kDecode[] = {DMATTN_SM80_DECODE(DMATTN_ROW)};
#undef DMATTN_ROW
#define DMATTN_ROW(DTYPE, TYPE, DIM, ROWS, ROOM) \
  {DType::DTYPE, DIM, DecodeRows::ROWS, launch_decode<TYPE, DIM, DecodeRows::ROWS, StepCall>},
constexpr DecodeInstance<StepCall> kStep[] = {DMATTN_SM80_STEP(DMATTN_ROW)};
#undef DMATTN_ROW

// The smallest instance that serves the call.
template <class Call, size_t kCount>
cudaError_t launch(const DecodeInstance<Call> (&instances)[kCount], const Call& given, cudaStream_t stream) {
  const DecodeParams& p = decode_of(given).p;
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const DecodeRows rows = decode_of(given).rows <= kMostFewRows ? DecodeRows::kFew : DecodeRows::kMany;
  const DecodeInstance<Call>* best = nullptr;
  for (const auto& instance : instances) {
    const bool fits = instance.dtype == p.dtype && instance.dim >= width && instance.rows == rows;
    if (fits && (!best || instance.dim < best->dim)) best = &instance;
  }
  return best ? best->launch(given, stream) : cudaErrorNotSupported;
}

template <class Call, size_t kCount>
cudaError_t launch(const Instance<Call> (&instances)[kCount], const AttentionParams& p, Variant variant, Room room,
                   const Call& call, cudaStream_t stream) {
  const int64_t width = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  const Instance<Call>* best = nullptr;
  for (const auto& instance : instances) {
    if (instance.dtype != p.dtype || instance.dim < width || (best && instance.dim > best->dim)) continue;
    if (instance.room != Room::kAny && instance.room != room) continue;
    if (instance.variant != variant && instance.variant != Variant::kGeneral) continue;
    // Prefer less padding of the head size, then the shape that uses more shared memory, then the special variant.
    if (best && instance.dim == best->dim && best->room == room && instance.room != room) continue;
    if (best && instance.dim == best->dim && best->room == instance.room && best->variant == variant) continue;
    best = &instance;
  }
  return best ? best->launch(call, stream) : cudaErrorNotSupported;
}

template <class Call, size_t kCount>
void list(std::ostream& text, const char* name, const Instance<Call> (&instances)[kCount]) {
  constexpr const char *kVariants[] = {"plain", "gathered", "general"}, *kRooms[] = {"large", "small", "any"};
  text << name << ":";
  for (const auto& instance : instances) {
    text << " " << (instance.dtype == DType::kBFloat16 ? "bfloat16" : "float16") << "/" << instance.dim << "/"
         << kVariants[static_cast<int>(instance.variant)] << "/" << kRooms[static_cast<int>(instance.room)];
  }
  text << "; ";
}

}  // namespace

cudaError_t forward(const ForwardCall& call, cudaStream_t stream) {
  return launch(kForward, call.p, variant_of(call.p, call.live_keys), Room::kAny, call, stream);
}

cudaError_t query_major(const BackwardCall& call, Room room, cudaStream_t stream) {
  return launch(kQueryMajor, call.b.forward, variant_of(call.b.forward, call.live_keys), room, call, stream);
}

cudaError_t key_major(const BackwardCall& call, Room room, cudaStream_t stream) {
  const AttentionParams& p = call.b.forward;
  const Variant variant = variant_of(p, call.live_keys);
  const bool has_mask = p.mask.tiles.data || p.mask.start.data || p.mask.end.data;
  const bool is_plain = variant == Variant::kPlain && !has_mask && call.batches_per_block * call.kv_heads_per_block == 1;
  return launch(kKeyMajor, p, is_plain ? Variant::kPlain : Variant::kGeneral, room, call, stream);
}

cudaError_t decode(const DecodeCall& call, cudaStream_t stream) { return launch(kDecode, call, stream); }
cudaError_t step(const StepCall& call, cudaStream_t stream) { return launch(kStep, call, stream); }

std::string compiled() {
  std::ostringstream text;
  list(text, "forward", kForward);
  list(text, "query-major backward", kQueryMajor);
  list(text, "key-major backward", kKeyMajor);
  text << "decode:";
  for (const auto& instance : kDecode) {
    text << " " << (instance.dtype == DType::kBFloat16 ? "bfloat16" : "float16") << "/" << instance.dim << "/"
         << (instance.rows == DecodeRows::kFew ? "few" : "many");
  }
  return text.str();
}

}  // namespace dmattn::cuda::sm80
