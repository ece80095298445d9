// Three C functions that say what this ops library is, and the search for another copy of it in the same process.
//
// torch's stable ABI reads an uninitialised handle when a namespace is defined twice, and lets a second kernel replace the first.
// An initialiser cannot make dlopen fail either. So a second copy registers nothing, says so, and names the first.
#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#define DMATTN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
const char* ops_file = nullptr;  // where this process has its ops from; null before the first op is registered
}

namespace dmattn {
// A mark, and behind it the namespace of the ops. A copy for the kernels hub has another name written over this one in the file
// (tools that do it look for the mark), so it is neither const nor static: the compiler must read it.
char namespace_slot[96] = "dmattn-ops-namespace=dmattn";
}  // namespace dmattn

// Lines "name=value": what this library was built with.
DMATTN_EXPORT const char* dmattn_build_facts() {
  return "version=" DMATTN_VERSION "\nbuilt_with_torch=" DMATTN_TORCH_BUILD_VERSION
         "\nstable_abi_target=2.10\ncuda=" DMATTN_CUDA_VERSION "\ncuda_archs=" DMATTN_CUDA_ARCHS
         "\ncuda_choice=" DMATTN_CUDA_CHOICE "\ncpu_levels=" DMATTN_CPU_LEVELS "\ncompiler=" DMATTN_COMPILER "\n";
}

// The file whose ops this process uses: this one, or another that was loaded before it.
DMATTN_EXPORT const char* dmattn_ops_file() { return ops_file; }

// The namespace of the ops, torch.ops.<name>.
DMATTN_EXPORT const char* dmattn_ops_namespace() { return dmattn::ops_namespace(); }

namespace dmattn {
namespace {

constexpr const char* kOpsFile = "dmattn_ops_file";
constexpr const char* kOpsNamespace = "dmattn_ops_namespace";
using Text = const char* (*)();  // a C function that says something

// The names of all files that are loaded.
std::vector<std::string> loaded_files() {
  std::vector<std::string> names;
  const auto keep = [](dl_phdr_info* file, size_t, void* to) {
    if (file->dlpi_name[0] != '\0') static_cast<std::vector<std::string>*>(to)->emplace_back(file->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(keep, &names);
  return names;
}

// The file that an address lies in.
Dl_info file_of(const void* address) {
  Dl_info file{};
  dladdr(address, &file);
  return file;
}

// What dmattn_ops_file says in a copy that is loaded and has ops of the same namespace; null for this copy and all other files.
const char* ops_file_of(void* handle) {
  void* const found = dlsym(handle, kOpsFile);
  if (!found || file_of(found).dli_fbase == file_of(&ops_file).dli_fbase) return nullptr;
  void* const where = dlsym(handle, kOpsNamespace);
  const char* const its_namespace = where ? reinterpret_cast<Text>(where)() : "dmattn";  // older copies do not say
  return std::strcmp(its_namespace, ops_namespace()) == 0 ? reinterpret_cast<Text>(found)() : nullptr;
}

// What another copy's dmattn_ops_file says; null when there is none, or none that has registered its ops.
const char* ops_file_of_another_copy() {
  for (const std::string& name : loaded_files()) {
    void* const handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!handle) continue;
    const char* const file = ops_file_of(handle);
    dlclose(handle);
    if (file) return file;
  }
  return nullptr;
}

bool find_ops_file() {
  const char* const own = file_of(&ops_file).dli_fname;
  const char* const other = ops_file_of_another_copy();
  if (other) {
    std::fprintf(stderr, "dmattn: %s: not used, because this process already has the ops of another copy, %s\n", own, other);
  }
  static const std::string kept = other ? other : own;
  ops_file = kept.c_str();
  return other == nullptr;
}

}  // namespace

const char* ops_namespace() { return std::strchr(namespace_slot, '=') + 1; }

bool is_first_copy() {
  static const bool is_first = find_ops_file();
  return is_first;
}

}  // namespace dmattn
