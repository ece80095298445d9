// The ops library as a file: the namespace its ops have, and that only the first copy with that namespace registers them.
#pragma once

#include <torch/csrc/stable/library.h>

namespace dmattn {

// Whether this copy is the one that registers. False where another file with ops of the same namespace came before it; stderr
// then names both.
bool is_first_copy();

// Where the ops are: torch.ops.<name>. "dmattn", but for a copy that was given another name for the kernels hub (docs/hub.md).
const char* ops_namespace();

}  // namespace dmattn

// What torch's STABLE_TORCH_LIBRARY_FRAGMENT and STABLE_TORCH_LIBRARY_IMPL do, in the namespace that this copy has. One in a
// file.
#define DMATTN_OPS(m) DMATTN_REGISTER(FRAGMENT, nullptr, m)
#define DMATTN_KERNELS(device, m) DMATTN_REGISTER(IMPL, #device, m)
#define DMATTN_REGISTER(kind, device, m)                                                                                     \
  static void register_all(torch::stable::detail::StableLibrary& m);                                                         \
  static const torch::stable::detail::StableTorchLibraryInit registered(                                                     \
      torch::stable::detail::StableLibrary::Kind::kind, &register_all, dmattn::ops_namespace(), device, __FILE__, __LINE__); \
  static void register_all(torch::stable::detail::StableLibrary& m)
