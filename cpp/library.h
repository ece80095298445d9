// The ops library as a file: the namespace its ops have, how they are registered in it, and that only the first copy registers.
//
// torch's macros STABLE_TORCH_LIBRARY_FRAGMENT and STABLE_TORCH_LIBRARY_IMPL make a string of the namespace that they are given,
// so it is fixed when the file is compiled. Ours is read when the file is loaded, because a copy for the kernels hub has another
// name written into the binary (docs/install.md). So the ops are registered here by the C functions that those macros call in the
// end. These C functions are torch's stable ABI; the classes between the macros and them, torch::stable::detail, are not, and no
// file of ours names that namespace. TORCH_BOX, a public macro, makes a kernel of each function. tests/ops/test_torch_headers.py
// fails when the headers of a torch declare any of this otherwise.
#pragma once

#include <torch/csrc/stable/library.h>

#include "checks.h"

namespace dmattn {

// Whether this copy is the one that registers. False where another file with ops of the same namespace came before it; stderr
// then names both.
bool is_first_copy();

// Where the ops are: torch.ops.<name>. "dmattn", but for a copy that was given another name for the kernels hub
// (docs/install.md).
const char* ops_namespace();

// A kernel as torch calls it: it takes its arguments from the stack and leaves its results there. TORCH_BOX makes it.
using BoxedKernel = void(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// Registers ops, or their kernels for one device, in the namespace of this copy, for as long as it lives.
class Registrar {
 public:
  // device: "CPU" or "CUDA" for kernels; null for the ops themselves. Runs `fill` where this copy is the one that registers.
  Registrar(const char* device, void (*fill)(Registrar&), const char* file, uint32_t line) {
    if (!is_first_copy()) return;
    const AOTITorchError error = device ? aoti_torch_library_init_impl(ops_namespace(), device, file, line, &library_)
                                        : aoti_torch_library_init_fragment(ops_namespace(), file, line, &library_);
    check(error == 0, "torch could not open the namespace ", ops_namespace(), " for ops");
    fill(*this);
  }
  ~Registrar() {
    if (library_) aoti_torch_delete_library_object(library_);
  }
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;

  void def(const char* schema) { check(aoti_torch_library_def(library_, schema) == 0, "torch does not take the op ", schema); }

  void impl(const char* name, BoxedKernel* kernel) {
    check(torch_library_impl(library_, name, kernel, TORCH_ABI_VERSION) == 0, "torch does not take a kernel for the op ", name);
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

}  // namespace dmattn

// The ops, and their kernels for one device: `DMATTN_KERNELS(CPU, m) { m.impl("select", TORCH_BOX(&select_op)); }`. One in a
// file.
#define DMATTN_OPS(m) DMATTN_REGISTER(nullptr, m)
#define DMATTN_KERNELS(device, m) DMATTN_REGISTER(#device, m)
#define DMATTN_REGISTER(device, m)                                                      \
  static void register_all(dmattn::Registrar& m);                                       \
  static const dmattn::Registrar registered(device, &register_all, __FILE__, __LINE__); \
  static void register_all(dmattn::Registrar& m)
