// What both programs here do: open the ops library, and read tensors that torch.save wrote as a list.
#pragma once

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

// Opening the library registers its ops, which a package names and does not hold. So it comes before the package.
inline bool open_ops_library(const char* path) {
  if (dlopen(path, RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
  std::cerr << "ops library: " << dlerror() << "\n";
  return false;
}

inline std::vector<at::Tensor> read_tensors(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& saved : list.toListRef()) tensors.push_back(saved.toTensor());
  return tensors;
}

// Calls run(ops library, folder) with the program's two arguments; an error becomes a line on stderr and the exit status 2.
template <class Run>
int run_with_arguments(int count, char** arguments, Run run) {
  if (count != 3) {
    std::cerr << "usage: " << arguments[0] << " <libdmattn_ops.so> <folder>\n";
    return 2;
  }
  try {
    return open_ops_library(arguments[1]) ? run(std::filesystem::path(arguments[2])) : 2;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
