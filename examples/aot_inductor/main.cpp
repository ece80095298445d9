// Runs an AOTInductor package with dmattn ops in it, without Python, and compares its outputs with the expected ones.
//
//   run_package <libdmattn_ops.so> <folder written by export_model.py>
//
// The one surprise: the ops library is not linked but opened with dlopen, before the package: opening it registers the ops.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

namespace fs = std::filesystem;

// Inputs of the model, then its expected output.
std::vector<at::Tensor> read_case(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& saved : list.toListRef()) tensors.push_back(saved.toTensor());
  return tensors;
}

int run(const char* ops_library, const fs::path& folder) {
  if (dlopen(ops_library, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << "ops library: " << dlerror() << "\n";
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader model(folder / "attention.pt2");

  std::vector<fs::path> cases;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".pt") cases.push_back(entry.path());
  }
  std::sort(cases.begin(), cases.end());

  size_t agreed = 0;
  for (const fs::path& path : cases) {
    std::vector<at::Tensor> inputs = read_case(path);
    const at::Tensor expected = inputs.back();
    inputs.pop_back();
    const at::Tensor got = model.run(inputs).at(0);
    const bool same = got.sizes() == expected.sizes() && at::allclose(got, expected, /*rtol=*/1e-5, /*atol=*/1e-6);
    agreed += same;
    std::cout << path.filename().string() << ": output " << got.sizes() << (same ? " agrees" : " DIFFERS");
    if (got.sizes() == expected.sizes()) std::cout << ", largest difference " << (got - expected).abs().max().item<float>();
    std::cout << "\n";
  }
  return cases.size() >= 2 && agreed == cases.size() ? 0 : 1;
}

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: run_package <libdmattn_ops.so> <folder written by export_model.py>\n";
    return 2;
  }
  try {
    return run(arguments[1], arguments[2]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
