// Runs an AOTInductor package with dmattn ops in it, without Python, and compares its outputs with the expected ones.
//
//   run_package <libdmattn_ops.so> <folder written by export_model.py>
#include <algorithm>

#include "package.h"

namespace fs = std::filesystem;

// A case is the inputs of the model, then its expected output.
int run(const fs::path& folder) {
  torch::inductor::AOTIModelPackageLoader model(folder / "attention.pt2");

  std::vector<fs::path> cases;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == ".pt") cases.push_back(entry.path());
  }
  std::sort(cases.begin(), cases.end());

  size_t agreed = 0;
  for (const fs::path& path : cases) {
    std::vector<at::Tensor> inputs = read_tensors(path);
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

int main(int count, char** arguments) { return run_with_arguments(count, arguments, run); }
